"""The config: one strict tree (root.py, one file per section), how it is read (load.py, values.py), how its errors are
explained (explain.py) and how it is printed (document.py). Imports no torch.
"""

from ebbtide.config.load import load, load_serve, recipes, replace_overrides
from ebbtide.config.root import Config

__all__ = ["Config", "load", "load_serve", "recipes", "replace_overrides"]
