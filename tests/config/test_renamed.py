"""Keys that had other names: refused with the new one, and understood in what runs of before wrote."""

import pytest
import yaml

from conftest import TINY, merged
from ebbtide.config import load
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.config.keys import all_keys
from ebbtide.config.renamed import RENAMED, VALUES, upgrade
from ebbtide.errors import UserError

OLD = {
    "rollout": {"prompts": 4, "samples": 2, "batch": 16, "ahead": 3, "cache": "kept", "temperature": 0.5},
    "loss": {"correction": {"cap": 3.0}},
    "advantage": {"drop_flat_groups": False},
    "memory": {"away": {"generate": ["moments"]}, "activations": {"gate": "ignore"}},
    "cluster": {"gpus": 2, "generate": "layers", "tries": 1},
    "task": {"scoring": {"seconds": 2.5}},
}
NEW = {
    "rollout": {
        "prompts_per_step": 4,
        "group_size": 2,
        "max_num_seqs": 16,
        "partial": {"extra_prompts": 3, "kv_cache": "keep"},
        "temperature": 0.5,
    },
    "loss": {"importance_sampling": {"high": 3.0}},
    "advantage": {"drop_zero_std_groups": False},
    "memory": {"offload": {"generate": ["moments"]}, "activations": {"on_slow_link": "ignore"}},
    "parallel": {"rollout_weights": "layerwise", "max_restarts": 1, "gpus": 2},
    "task": {"scoring": {"timeout_s": 2.5}},
}


def test_the_config_of_an_earlier_run_is_read_as_it_was_meant() -> None:
    named = {"algorithm": "grpo"}  # the only one there was
    assert upgrade(OLD) == named | NEW
    assert upgrade(NEW) == named | NEW
    assert upgrade({"loss": {"importance_sampling": {"cap": 3.0}}}) == named | {"loss": NEW["loss"]}
    assert upgrade({"cluster": None, "rollout": "odd"}) == named | {"parallel": None, "rollout": "odd"}
    assert upgrade({"checkpoint": {"metric": "clipped"}}) == named | {"checkpoint": {"metric": "clip_fraction"}}
    assert upgrade({"algorithm": "sft"}) == {"algorithm": "sft"}


def test_every_new_name_is_a_key_and_no_old_one() -> None:
    keys = set(all_keys(GrpoConfig))
    assert set(RENAMED.values()) <= keys
    assert not set(RENAMED) & keys
    assert set(VALUES) <= keys


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.prompts=3", "unknown key `rollout.prompts` (= 3). It is now `rollout.prompts_per_step`."),
        ("cluster.gpus=2", "It is now `parallel.gpus`."),
        ("cluster.generate=layers", "It is now `parallel.rollout_weights`."),
        ("parallel.rollout_weights=whole", "should be 'gathered' or 'layerwise'. It is now `gathered`."),
        ("memory.away.generate=[moments]", "It is now `memory.offload.generate`."),
    ],
)
def test_an_old_key_is_refused_with_its_new_name(override: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        load("quickstart", [override])
    assert said in str(refused.value)


@pytest.mark.parametrize("beside", ["metrics.jsonl", "manifest.json"])  # of a run, and of a checkpoint
def test_the_config_file_of_an_earlier_run_runs_again(tmp_path, beside) -> None:
    old = merged(TINY, {})
    rollout = old["rollout"]
    rollout["prompts"], rollout["samples"] = rollout.pop("prompts_per_step"), rollout.pop("group_size")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    with pytest.raises(UserError, match=r"It is now `rollout\.group_size`"):
        load(str(tmp_path / "config.yaml"))
    (tmp_path / beside).touch()
    assert load(str(tmp_path / "config.yaml")).rollout.group_size == TINY["rollout"]["group_size"]
