"""Rates by name, and those that were measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.errors import UserError
from ebbtide.system.machine import KNOWN, machine_for, rates_file, rates_for, save_rates, this_machine


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA L4", "l4"),
        ("rtx4090", "4090"),
        ("RTX-4090", "4090"),
        ("GeForceRTX4090", "4090"),
        ("rtxa6000", "a6000"),
        ("H-200", "h200"),
        ("L40-S", "l40s"),
        ("a100-40gb", "a100-40"),
        ("A10040GB", "a100-40"),
        ("a10080gb", "a100"),
    ],
)
def test_a_gpu_is_known_by_its_own_name(name: str, key: str) -> None:
    rates, source = rates_for(name)
    assert rates == KNOWN[key][1]
    assert "known figures" in source


@pytest.mark.parametrize(
    "name", ["Some Other GPU", "NVIDIA A10G", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA RTX 6000 Ada Generation"]
)
def test_one_that_is_not_known_says_so(name: str) -> None:
    assert "because there are none for" in rates_for(name)[1]


def test_measured_rates_are_kept_and_used() -> None:
    mine = replace(KNOWN["h200"][1], link_out=1e9)
    save_rates("NVIDIA H200", 139.0, mine)
    save_rates("Some Other GPU", 16.0, replace(mine, link_out=2e9))
    assert rates_for("NVIDIA H200") == (mine, "measured on this machine's NVIDIA H200")
    assert rates_for("Some Other GPU")[0].link_out == 2e9
    assert machine_for("h200", None, None, None).rates == mine
    assert machine_for("H200", None, None, None).rates == mine
    for spelling in ("some other gpu", "SomeOther-GPU"):
        assert machine_for(spelling, None, None, None).device_gib == 16.0
    with pytest.raises(UserError, match="calibrated here: NVIDIA H200, Some Other GPU"):
        machine_for(None, None, None, None)
    assert this_machine("NVIDIA H200", 2**30, 2**31).rates == mine


def test_the_only_measured_machine_is_the_one_that_is_meant() -> None:
    with pytest.raises(UserError, match="--gpu"):
        machine_for(None, None, None, None)
    save_rates("NVIDIA H100", 93.0, KNOWN["h100"][1])
    found = machine_for(None, None, None, None)
    assert (found.name, found.device_gib) == ("NVIDIA H100", 93.0)


def test_rates_of_another_version_are_passed_over() -> None:
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text('{"NVIDIA H200": {"matmul": 1}}')
    assert "known figures" in rates_for("NVIDIA H200")[1]


@pytest.mark.parametrize("matmul", ["0", "-1", "NaN", "Infinity", "1e-320", "1" + 400 * "0", '"fast"', "null", "[1]"])
def test_rates_that_no_machine_has_are_named(matmul: str) -> None:
    file = save_rates("NVIDIA H200", 139.0, replace(KNOWN["h200"][1], matmul=5.0))
    file.write_text(file.read_text().replace("5.0", matmul, 1))
    with pytest.raises(UserError, match=r"rates\.json does not contain.*--calibrate`, or delete the file"):
        machine_for("h200", None, None, None)
    save_rates("NVIDIA H200", 139.0, KNOWN["h200"][1])  # as the message says
    assert machine_for("h200", None, None, None).rates == KNOWN["h200"][1]


@pytest.mark.parametrize("text", ["", "[]", '{"NVIDIA H200": 3}', 100_000 * "["])
def test_a_file_of_another_kind_is_named(text: str) -> None:
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text(text)
    with pytest.raises(UserError, match=r"rates\.json does not contain"):
        machine_for("h200", None, None, None)


def test_figures_on_the_command_line_come_first() -> None:
    found = machine_for("a100", 20.0, 64.0, 12.0)
    assert (found.device_gib, found.host_gib, found.rates.link_in) == (20.0, 64.0, 12e9)
    with pytest.raises(UserError, match=r"`--gpu tpu` is not known.*instead of `--gpu`"):
        machine_for("tpu", 40.0, 100.0, 25.0)
    assert machine_for(None, 40.0, None, None).name == "GPU"
