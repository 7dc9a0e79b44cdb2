"""The config: one strict tree (tree.py), how it is read (load.py, written.py), what is wrong with it (explain.py), how it is shown
(document.py). Imports no torch.
"""

from ebbtide.config.load import changed, load, load_serve, recipes
from ebbtide.config.tree import Config

__all__ = ["Config", "changed", "load", "load_serve", "recipes"]
