"""Opens a file of another tool: finds out whose it is and what it trains, and reads it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ebbtide.errors import UserError
from ebbtide.importing.readers.commands import flag_settings, hydra_settings
from ebbtide.importing.readers.python_calls import Calls, read_calls, reward_functions
from ebbtide.importing.readers.shell import Word, read_script
from ebbtide.importing.readers.yaml_files import Layers, read_layers, read_text
from ebbtide.importing.source import Found, Source, Unread

COMMAND_LINE = "the command line"
MOVE = "to do: move it to a file of its own: importing the script runs it"

NEMO_SECTIONS = {"grpo": "grpo", "sft": "sft", "dpo": "dpo", "distillation": "distill"}
TRL_CONFIGS = {
    "GRPOConfig": "grpo",
    "AsyncGRPOConfig": "grpo",
    "RLOOConfig": "grpo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "GKDConfig": "distill",
}
COMMAND = re.compile(r"\s*(\w+=\S*\s+)*(accelerate|python3?|torchrun|trl|uv)\s")
TRL_COMMANDS = {"grpo": "grpo", "rloo": "grpo", "sft": "sft", "dpo": "dpo", "gkd": "distill"}
# Keys that tell what a YAML of TRL is for, as it does not say so itself.
TRL_SIGNS = {
    "grpo": ("num_generations", "reward_funcs", "max_completion_length", "epsilon", "scale_rewards", "use_vllm"),
    "distill": ("teacher_model_name_or_path", "lmbda"),
    "dpo": ("precompute_ref_log_probs", "beta", "rpo_alpha", "max_prompt_length"),
}
LORA_NAMES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "exclude_modules": "lora_exclude_modules",
    "lora_dropout": "lora_dropout",
    "task_type": "lora_task_type",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "bias": "lora_bias",
}


def read_source(path: Path, overrides: Sequence[str]) -> Source:
    """All that a file sets, changed by `overrides`, which are in its own tool's spelling. `algorithm=...` among them
    says what a YAML of TRL is for."""
    if not path.is_file():
        raise UserError(f"{path} is not a file: name a YAML, a shell script or a Python script of NeMo RL, verl or TRL")
    settings = hydra_settings([Word(one, 0) for one in overrides], COMMAND_LINE)
    settings = {key: Found(found.value, COMMAND_LINE) for key, found in settings.items()}
    if odd := [one for one in overrides if "=" not in one or one.startswith("~")]:
        raise UserError(f"`{odd[0]}` is not an override: write `key=value`, with a key of the file's own tool")
    algorithm = settings.pop("algorithm", None)
    if path.suffix in (".yaml", ".yml", ".json"):
        source = _read_yaml(path, settings)
    elif path.suffix in (".py", ".ipynb"):
        source = _read_python(path)
        source.keys |= settings
    else:
        source = _read_shell(path)
        source.keys |= settings
    if algorithm is not None:
        source.algorithm = str(algorithm.value)
    return source


# YAML


def _read_yaml(path: Path, settings: Mapping[str, Found]) -> Source:
    layers = read_layers(path, strict=False)
    tree = layers.tree
    named = [name for name in NEMO_SECTIONS if isinstance(tree.get(name), dict)]
    if "actor_rollout_ref" in tree or "trainer" in tree:
        return _hydra(path, layers, settings)
    if isinstance(tree.get("policy"), dict) or named or "ppo" in tree:
        return _nemo_rl(path, layers, settings, named)
    if "model_name_or_path" in tree or any(sign in tree for signs in TRL_SIGNS.values() for sign in signs):
        for key, found in settings.items():
            layers.set(key, found.value, COMMAND_LINE)
        keys = layers.found(str(path))
        said = f"taken to be for {_guess_trl(keys).upper()}: `algorithm=grpo`, `sft` or `dpo` says otherwise"
        return Source("trl", _guess_trl(keys), keys, [said])
    if "model" in tree and {"task", "data", "rollout", "algorithm"} & set(tree):
        raise UserError(f"{path} is a config of Ebbtide already: `ebbtide train {path}`")
    raise UserError(
        f"{path} is not a config that can be imported: one of NeMo RL has a section `policy`, one of verl"
        " `actor_rollout_ref`, and one of TRL `model_name_or_path`"
    )


def _nemo_rl(path: Path, layers: Layers, settings: Mapping[str, Found], named: Sequence[str]) -> Source:
    if layers.missing:
        read_layers(path)  # says which file is not there
    for key, found in settings.items():
        layers.set(key, found.value, COMMAND_LINE)
    if "ppo" in layers.tree or "value" in layers.tree:
        raise UserError(
            f"{path} is for PPO with a value model (its sections `ppo` and `value`), which Ebbtide does not have:"
            " GRPO and its kin have none, and `advantage.kind` has their baselines"
        )
    if not named:
        raise UserError(
            f"{path} has none of the sections {', '.join(f'`{name}`' for name in NEMO_SECTIONS)}: it is not for one of"
            " the algorithms that Ebbtide has"
        )
    if any(key in layers.tree for key in ("teachers", "token_aligner")):
        raise UserError(
            f"{path} distills from teachers with another tokenizer, and `teacher` must have the policy's vocabulary"
        )
    return Source("nemo_rl", NEMO_SECTIONS[named[0]], layers.found(str(path)))


def _hydra(path: Path, layers: Layers, settings: Mapping[str, Found]) -> Source:
    for key, found in settings.items():
        layers.set(key, found.value, COMMAND_LINE)
    notes = [
        f"`{name}` in `defaults` is not beside the file: verl's own defaults stand for it" for name in layers.missing
    ]
    algorithm = "grpo" if "actor_rollout_ref" in layers.tree else "sft"
    return Source("verl", algorithm, layers.found(str(path)), notes)


def _guess_trl(keys: Mapping[str, Found]) -> str:
    return next((kind for kind, signs in TRL_SIGNS.items() if any(sign in keys for sign in signs)), "sft")


# Shell


def _read_shell(path: Path) -> Source:
    script = read_script(read_text(path))
    for words in script.commands:
        texts = [word.text for word in words]
        if any(text.startswith("verl.") or "main_ppo" in text or "main_dapo" in text for text in texts):
            return _verl(path, words)
        if (source := _trl_command(words, path.name, path.parent)) is not None:
            return source
        if any("run_grpo" in text or "run_sft" in text or "run_dpo" in text for text in texts):
            return _nemo_command(path, words)
    raise UserError(
        f"{path} has no command that can be imported: `python -m verl.trainer.main_ppo ...`, `trl grpo ...`, or a"
        " script with `--model_name_or_path`"
    )


def _nemo_command(path: Path, words: Sequence[Word]) -> Source:
    """`uv run examples/run_grpo.py --config FILE a.b=c`."""
    config = flag_settings([word for word in words if "=" not in word.text or word.text.startswith("-")], path.name)
    named = config.get("config")
    file = _find_near(path, str(named.value)) if named is not None else None
    if file is None:
        raise UserError(f"{path}: the file of its `--config` is not there: import that file, with the other settings")
    return _read_yaml(file, hydra_settings(words, path.name))


def _verl(path: Path, words: Sequence[Word]) -> Source:
    texts = [word.text for word in words]
    algorithm = "sft" if any("sft_trainer" in text for text in texts) else "grpo"
    options = flag_settings([word for word in words if word.text.startswith("--config")], path.name)
    keys, notes = hydra_settings(words, path.name), list[str]()
    keys.pop("hydra.run.dir", None)
    for launcher in ("nproc_per_node", "nnodes"):
        if (found := flag_settings(words, path.name).get(launcher)) is not None and algorithm == "sft":
            keys[f"torchrun.{launcher}"] = found
    name = options.get("config_name")
    if name is not None and not str(name.value).startswith("ppo_"):
        folder = str(options["config_path"].value) if "config_path" in options else "config"
        file = _find_near(path, f"{folder}/{name.value}.yaml")
        if file is None:
            notes.append(f"`--config-name={name.value}` is not near the script: verl's own defaults stand for it")
        else:
            below = _hydra(file, read_layers(file, strict=False), {})
            keys, notes = below.keys | keys, below.notes
    return Source("verl", algorithm, keys, notes)


def _find_near(path: Path, name: str) -> Path | None:
    """The file of this name beside a script, or seen from a folder above it, from which it is meant to be run."""
    plain = name.replace("\0", "").lstrip("./")
    return next((folder / plain for folder in path.resolve().parents if (folder / plain).is_file()), None)


def _trl_command(words: Sequence[Word], file: str, folder: Path) -> Source | None:
    """Reads `trl grpo --...`, `accelerate launch ... script.py --...` or `python script.py --...`."""
    texts = [word.text for word in words]
    start = next((place for place, text in enumerate(texts) if text == "trl" or text.endswith("/trl")), None)
    if start is not None and start + 1 < len(texts) and texts[start + 1] in TRL_COMMANDS:
        kind, start = texts[start + 1], start + 1
        keys = flag_settings(words[start + 1 :], file)
        source = Source("trl", TRL_COMMANDS[kind], keys)
    else:
        script = next((place for place, text in enumerate(texts) if text.endswith(".py")), None)
        if script is None or not any(text.startswith(("accelerate", "python", "uv", "torchrun")) for text in texts):
            return None
        keys = flag_settings(words[script + 1 :], file)
        launcher = flag_settings(words[:script], file)
        for name in ("num_processes", "nproc_per_node"):
            if name in launcher:
                keys["accelerate.num_processes"] = launcher[name]
        if "config_file" in launcher:
            keys |= _accelerate(str(launcher["config_file"].value), folder / file, keys)
        if "model_name_or_path" not in keys and "config" not in keys:
            return None
        kind = Path(texts[script]).stem
        guess = next((one for sign, one in {**TRL_COMMANDS, "gspo": "grpo"}.items() if sign in kind), None)
        source = Source("trl", guess or _guess_trl(keys), keys)
    if kind == "rloo":
        source.keys.setdefault("trainer", Found("rloo", file))
    if (config := source.keys.pop("config", None)) is not None:
        below = _find_near(folder / file, str(config.value))
        if below is None:
            raise UserError(f"{folder / file}: `--config {config.value}` is not there: import that file instead")
        source.keys = read_layers(below).found(str(below)) | source.keys
    return source


def _accelerate(name: str, beside: Path, known: Mapping[str, Found]) -> dict[str, Found]:
    """The number of processes that a config of accelerate starts, where the command does not name it."""
    file = _find_near(beside, name)
    if file is None or "accelerate.num_processes" in known:
        return {}
    found = read_layers(file, strict=False).found(str(file)).get("num_processes")
    return {} if found is None else {"accelerate.num_processes": found}


# Python


def _read_python(path: Path) -> Source:
    calls = read_calls(_code(path), path.name)
    kinds = [name for name in calls.calls if name in TRL_CONFIGS]
    command = _docstring_command(calls, path)
    named = [name for name in TRL_CONFIGS if re.search(rf"\b{name}\b", calls.text)]
    if not kinds and (command is None or not named):
        raise UserError(
            f"{path} calls none of {', '.join(TRL_CONFIGS)}, nor has its docstring a command for one of them that sets"
            " `--model_name_or_path`: import the command line that starts it"
        )
    kind = (kinds or named)[0]
    keys = dict(command.keys) if command is not None else {}
    for name in kinds:
        keys |= calls.calls[name]
    keys |= {key: found for key, found in calls.assigned.items() if key not in ("pad_token", "chat_template")}
    keys |= calls.calls.get("ModelConfig", {})
    keys |= {LORA_NAMES.get(key, key): found for key, found in calls.calls.get("LoraConfig", {}).items()}
    if "LoraConfig" in calls.calls:
        keys.setdefault("use_peft", Found(True, path.name))
    keys |= {key: found for key, found in calls.calls.get("BitsAndBytesConfig", {}).items() if "load_in" in key}
    for name in ("trainer_class", "0"):
        keys.pop(name, None)
    trainer = next((one for name, one in calls.calls.items() if name.endswith("Trainer") and "model" in one), {})
    for key in ("reward_funcs", "tools", "environment_factory", "rollout_func"):
        if key in trainer:
            keys[key] = trainer[key]
    own = list[str]()
    if "reward_funcs" in keys:
        script = "" if path.suffix == ".ipynb" else str(path)
        keys["reward_funcs"], own = reward_functions(keys["reward_funcs"], calls, script)
    if trainer and "model_name_or_path" not in keys:
        keys["model_name_or_path"] = _model(trainer["model"], calls)
    if "dataset_name" not in keys and "0" in calls.calls.get("load_dataset", {}):
        keys["dataset_name"] = calls.calls["load_dataset"]["0"]
    if kind == "RLOOConfig":
        keys["trainer"] = Found("rloo", path.name)
    notes = ["the command in its docstring was read as well"] if command is not None else []
    return Source("trl", TRL_CONFIGS[kind], keys, notes, dict.fromkeys(own, MOVE if calls.runs else ""))


def _model(found: Found, calls: Calls) -> Found:
    """The model of a trainer: a text, or what `from_pretrained` loads; of several, the one that it names, or the first
    one."""
    if isinstance(found.value, Unread) and (named := calls.loaded_model(ast.parse(found.value.text, mode="eval").body)):
        return Found(named, found.place)
    loaded = calls.calls.get("from_pretrained", {})
    if isinstance(found.value, Unread) and (first := loaded.get("0") or loaded.get("pretrained_model_name_or_path")):
        return first
    return found


def _docstring_command(calls: Calls, path: Path) -> Source | None:
    lines = calls.docstring.splitlines()
    starts = [place for place, line in enumerate(lines) if COMMAND.match(line)]
    for words in [read_script("\n".join(lines[start:])).commands[0] for start in starts]:
        source = _trl_command(words, path.name, path.parent)
        if source is not None:
            place = f"{path.name}, in its docstring"
            source.keys = {
                key: Found(found.value, place if found.place.startswith(path.name) else found.place)
                for key, found in source.keys.items()
            }
            return source
    return None


def _code(path: Path) -> str:
    """The code of a script, or of a notebook's cells."""
    text = read_text(path)
    if path.suffix != ".ipynb":
        return text
    try:
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        lines = [line for cell in cells for line in (cell if isinstance(cell, str) else "".join(cell)).splitlines()]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a notebook: {error}") from None
    return "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)
