"""What a config's YAML may hold: everything else is an error that says where, at once."""

import pytest

from ebbtide.config.yaml_text import read_yaml
from ebbtide.errors import UserError

STEPS = list(zip("abcdefghi", "bcdefghij", strict=True))
TENFOLD = "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in STEPS)
MERGED = "".join(f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n" for before, name in STEPS)
CHAIN = "".join(f"v{number}: &v{number} [*v{number - 1}]\n" for number in range(1, 200))


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("a: &a [1]\n" + TENFOLD, "with its aliases expanded it has more than 1,000,000 characters"),
        ("a: &a {x: 1}\n" + MERGED, "with its aliases expanded it has more than 1,000,000 characters"),
        ("v0: &v0 [1]\n" + CHAIN, "more than 100 deep"),
        ("a: &a [*a]", "an alias refers to a value that contains it"),
        ("a: " + "[" * 150 + "]" * 150, "more than 100 deep"),
        ("a: !!timestamp x", "`!!timestamp` is not a type of value in a config"),
        ("a: !!binary x", "`!!binary` is not a type of value"),
        ("a: !!set {x: null}", "`!!set` is not a type of value"),
        ("a: !!python/object/apply:os.getcwd []", "`!!python/object/apply:os.getcwd` is not a type of value"),
        ("a: !mine 3", "`!mine` is not a type of value"),
        ("a: !!bool x", "'x' is not a valid `!!bool`"),
        ('a: !!int ""', "'' is not a valid `!!int`"),
        ("a: !!float x", "'x' is not a valid `!!float`"),
        (r'a: "half \ud800"', "which neither files nor models accept"),
        (r'"\0": 1', "which neither files nor models accept"),
        ("a: " + "9" * 5000, "4300"),
        ("a: \x1b[31m", "special characters are not allowed"),
        ("a: 1\n---\nb: 2", "another document"),
    ],
)
def test_what_no_config_holds_is_refused(text, needle) -> None:
    with pytest.raises(UserError, match="this text is not valid YAML") as caught:
        read_yaml(text, "this text")
    assert needle in str(caught.value)


def test_what_people_write_is_read() -> None:
    text = "usual: &usual {lr: 1e-6, day: 2024-02-30}\nmine: {<<: *usual, lr: !!str 3}\nlist: [*usual, =, ~, .5, yes]\n"
    usual = {"lr": 1e-6, "day": "2024-02-30"}
    wanted = {"usual": usual, "mine": {**usual, "lr": "3"}, "list": [usual, "=", None, 0.5, True]}
    assert read_yaml(text, "") == wanted
    assert read_yaml("# nothing", "") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", "010"),
        ("0", 0),
        ("-3", -3),
        ("1_000", 1000),
        ("0x1F", 31),
        ("1:30", "1:30"),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e3", 1000.0),
    ],
)
def test_numbers_are_what_people_mean_by_them(text, value) -> None:
    """YAML 1.1 has 8 for `010`, and 90 for `1:30`."""
    found = read_yaml(text, "it")
    assert (type(found), found) == (type(value), value)
