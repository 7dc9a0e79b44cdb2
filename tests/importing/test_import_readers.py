"""Reading the files of other tools: YAML in layers, shell, Python; never executing any of it."""

from pathlib import Path

import pytest

from ebbtide.errors import UserError
from ebbtide.importing.readers.commands import flag_settings, hydra_settings
from ebbtide.importing.readers.interpolation import resolve
from ebbtide.importing.readers.open import read_source
from ebbtide.importing.readers.python_calls import read_calls
from ebbtide.importing.readers.shell import read_script
from ebbtide.importing.readers.yaml_files import read_layers
from ebbtide.importing.source import Unread


def last_command(text: str) -> list[str | Unread]:
    return [word.value for word in read_script(text).commands[-1]]


def test_interpolation_is_that_of_omegaconf() -> None:
    tree = {
        "a": {"size": 4, "twice": "${mul:${.size}, 2}", "up": "${..b}", "name": "x-${a.size}"},
        "b": "${max:${a.size},3}",
        "env": "${oc.env:HOME,/default}",
        "none": "${oc.env:HOME}",
        "list": [{"of": "${a.twice}"}],
        "section": "${a}",
    }
    found = resolve(tree, "here")
    assert found["a"] == {"size": 4, "twice": 8, "up": 4, "name": "x-4"}
    assert (found["b"], found["env"], found["list"]) == (4, "/default", [{"of": 8}])
    assert found["none"] == Unread("${oc.env:HOME}")  # The environment is not looked up.
    assert found["section"]["twice"] == 8


def test_interpolation_in_a_circle_or_to_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match="refers to itself"):
        resolve({"a": "${b}", "b": "${a}"}, "here")
    with pytest.raises(UserError, match=r"`a` refers to `\$\{x\.y\}`, and there is no `x\.y`"):
        resolve({"a": "${x.y}"}, "here")
    assert resolve({"a": "${x.y}"}, "here", complete=False) == {"a": Unread("${x.y}")}


def test_defaults_are_merged_and_overridden(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: 2}\nb: {x: 1, y: 2}\nc: ${a.x}\n")
    (tmp_path / "top.yaml").write_text("defaults: base.yaml\na: {x: 5}\nb:\n  _override_: true\n  z: 3\n")
    found = read_layers(tmp_path / "top.yaml").found("top.yaml")
    assert {key: one.value for key, one in found.items()} == {"a.x": 5, "a.y": 2, "b.z": 3, "c": 5}
    assert (found["a.x"].place, found["a.y"].place) == ("top.yaml:2", "base.yaml:1")


def test_a_base_that_is_missing_or_names_its_heir_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: nothing.yaml\npolicy: {}\ngrpo: {}\n")
    with pytest.raises(UserError, match=r"nothing\.yaml"):
        read_source(tmp_path / "a.yaml", [])
    (tmp_path / "b.yaml").write_text("defaults: b.yaml\npolicy: {}\n")
    with pytest.raises(UserError, match="names it in turn"):
        read_source(tmp_path / "b.yaml", [])


def test_yaml_constructs_no_objects(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("policy: !!python/object/apply:os.system ['echo no']\n")
    with pytest.raises(UserError, match="not a type of value"):
        read_source(tmp_path / "a.yaml", [])


def test_shell_variables_arrays_and_quotes() -> None:
    text = """
    export A=1 B="two words"   # a comment
    LIST=(x=$A "y=$B")
    LIST+=(z='$A')
    EMPTY=()
    run "${LIST[@]}" "${EMPTY[@]}" \\
        d=${D:-"a $A"} e=$((A * 3 + (2 - 1))) f=${A}b h=$HOME $@ > out.txt
    """
    assert last_command(text) == ["run", "x=1", "y=two words", "z=$A", "d=a 1", "e=4", "f=1b", "h=~"]


def test_shell_commands_are_not_run() -> None:
    assert last_command("run a=$(touch /tmp/never) b=`id` c=$UNSET/x d=$(pwd)/y") == [
        "run",
        Unread("a=$(touch /tmp/never)"),
        Unread("b=`id`"),
        Unread("c=$UNSET/x"),
        "d=./y",
    ]


def test_the_first_branch_of_an_if_counts() -> None:
    assert last_command("if [ $X = 1 ]; then n=1; else n=2; m=3; fi\nrun n=$n m=$m") == ["run", "n=1", "m=3"]


def test_an_unquoted_variable_is_several_words() -> None:
    assert last_command('ALL="a=1 b=2"\nrun $ALL "$ALL"') == ["run", "a=1", "b=2", "a=1 b=2"]


def test_settings_of_hydra_and_of_argparse() -> None:
    words = read_script("run +a.b=[1,2] ++c=null ~d e='x y' f=1e-6 g=True").commands[0]
    assert {key: one.value for key, one in hydra_settings(words, "s.sh").items()} == {
        "a.b": [1, 2],
        "c": None,
        "e": "x y",
        "f": 1e-6,
        "g": True,
    }
    words = read_script("--use-peft --r 8 --mods q v --lr=-1.5 --low -2").commands[0]
    found = {key: one.value for key, one in flag_settings(words, "s.sh").items()}
    assert found == {"use_peft": True, "r": 8, "mods": ["q", "v"], "lr": -1.5, "low": -2}


def test_python_arguments_are_read_as_literals() -> None:
    text = """
n, name = 4, "a/b"
common = dict(beta=0.1)
p.add_argument("--top-k", default=20)
GRPOConfig(num=n, k=args.top_k, name=name, text=f"{n}", size=len(name), neg=-2, dtype=torch.bfloat16, **common)
training_args.seed = 3
"""
    calls = read_calls(text, "s.py")
    found = {key: one.value for key, one in calls.calls["GRPOConfig"].items()}
    assert found == {
        "num": 4,
        "k": 20,
        "name": "a/b",
        "text": Unread("f'{n}'"),
        "size": Unread("len(name)"),
        "neg": -2,
        "dtype": "bfloat16",
        "beta": 0.1,
    }
    assert calls.assigned["seed"].value == 3


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.py", "def (", "not valid Python"),
        ("x.py", "print(1)", "calls none of GRPOConfig"),
        ("x.sh", "echo hello\n", "no command that can be imported"),
        ("x.yaml", "a: 1\n", "not a config that can be imported"),
        ("x.yaml", "- 1\n", "must contain"),
        ("x.yaml", "model: m\ntask: {}\n", "config of Ebbtide already"),
        ("x.yaml", "policy: {model_name: m}\nrm: {}\n", "has none of the sections"),
        ("x.ipynb", "{}", "not a notebook"),
    ],
)
def test_what_cannot_be_imported_says_why(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        read_source(tmp_path / name, [])


def test_an_override_is_a_setting(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n")
    with pytest.raises(UserError, match="`~a` is not an override"):
        read_source(tmp_path / "x.yaml", ["~a"])
