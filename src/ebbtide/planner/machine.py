"""What a machine can do: memory, and the rates that a plan's seconds follow from. Measured there (`ebbtide rehearse --calibrate`), or known by the GPU's name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """Bytes, operations or parameters a second."""

    matmul: float
    """Operations of a large product of 16-bit matrices."""
    copy: float
    """Bytes read and written by a copy inside the device's memory."""
    link_out: float
    """Bytes of a pinned copy from the device to the host."""
    link_in: float
    """And back."""
    cpu_adam: float
    """Parameters that the CPU steps."""
    host_op: float
    """Operations that Python hands to the device: what limits small batches."""


@dataclass(frozen=True)
class Links:
    """Between GPUs: bytes a second that each sends, as it receives as many."""

    near: float
    """To those of its node."""
    far: float
    """To those of other nodes, while all of its node do so."""
    bridged: bool
    """Those of a node have links of their own (NVLink), or only the bus (PCIe)."""


@dataclass(frozen=True)
class Machine:
    name: str
    device_gib: float
    host_gib: float
    rates: Rates
    source: str
    """Where the rates come from, in words."""
    links: Links
    timed: bool = True
    """Whether seconds can be foretold: not of a CPU, whose small kernels follow no rate."""

    @property
    def groups(self) -> bool:
        """Whether torch multiplies by many experts at once there, without asking the host: so that decoding with experts is captured as a graph."""
        return _key(self.name) in GROUPS_EXPERTS


# Measured on an H200: benchmarks/plan.py. Of the others, memory, products and copies are what their data sheets say, scaled as the H200's measured figures are to its
# own sheet (matmul 0.79, copy 0.87), and the link is that of their bus. Hosts differ more than GPUs: 1.7 to 4.7 billion parameters a second were seen beside one kind of GPU, so that a
# host of which nothing is known is taken for a slow one.
_H200 = Rates(matmul=786e12, copy=4.19e12, link_out=55.0e9, link_in=55.5e9, cpu_adam=2.85e9, host_op=140e3)


PEAK_TFLOPS: Mapping[str, float] = {
    "h200": 989, "b200": 2250, "h100": 989, "a100": 312, "a100-40": 312, "l40s": 362, "a6000": 155, "a10": 125, "l4": 121,
    "5090": 210, "4090": 165, "3090": 71,
}  # fmt: skip
"""What the data sheets say of dense products in bfloat16: what MFU is a share of."""


def peak_flops(name: str) -> float | None:
    """Of the GPU that calls itself so; None where it is not known."""
    key = _key(name)
    return PEAK_TFLOPS[key] * 1e12 if key is not None else None


def _sheet(name: str, copy: float, link: float) -> Rates:
    return Rates(
        0.79 * PEAK_TFLOPS[name] * 1e12, 0.87 * copy * 1e12, link * 1e9, link * 1e9, cpu_adam=_H200.cpu_adam, host_op=_H200.host_op
    )


KNOWN: Mapping[str, tuple[float, Rates]] = {
    "h200": (139.8, _H200),
    "b200": (178.4, _sheet("b200", 8.0, 55)),
    "h100": (79.1, _sheet("h100", 3.35, 55)),
    "a100": (79.2, _sheet("a100", 2.04, 25)),
    "a100-40": (39.4, _sheet("a100-40", 1.56, 25)),
    "l40s": (44.4, _sheet("l40s", 0.864, 25)),
    "a6000": (47.4, _sheet("a6000", 0.768, 25)),
    "a10": (22.1, _sheet("a10", 0.6, 25)),
    "l4": (22.1, _sheet("l4", 0.3, 25)),
    "5090": (31.4, _sheet("5090", 1.79, 50)),
    "4090": (23.5, _sheet("4090", 1.008, 25)),
    "3090": (23.6, _sheet("3090", 0.936, 25)),
}
"""Name -> (GiB that a process can have, rates)."""

GROUPS_EXPERTS = {"h100", "h200", "b200"}

# Of no link between GPUs is there a measurement: what the sheets say (NVLink 3, 4 and 5, a direction; the bus elsewhere; a network of 200 or 400 Gb/s for each GPU where nodes are
# sold so, else 100), in a proportion that is assumed.
REACHED = 0.8
_BUS = {"5090": 50.0}
_NVLINK = {"b200": (900.0, 50.0), "h200": (450.0, 50.0), "h100": (450.0, 50.0), "a100": (300.0, 25.0), "a100-40": (300.0, 25.0)}


def links_for(name: str) -> Links:
    """Of the GPU that calls itself so."""
    key = _key(name) or TAKEN_FOR
    near, far = _NVLINK.get(key, (_BUS.get(key, 25.0), 12.5))
    return Links(REACHED * near * 1e9, REACHED * far * 1e9, key in _NVLINK)


USUAL_HOST_GIB = 128.0  # for each GPU of a node
USUAL_NODE = 8  # GPUs
TAKEN_FOR = "3090"  # a GPU of which nothing is known


def rates_file() -> Path:
    """Where the measured rates of this machine are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbtide" / "rates.json"


def keep_rates(name: str, device_gib: float, rates: Rates) -> Path:
    """Writes what was measured on a GPU of this name, beside that of others."""
    file = rates_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        known = {**_kept(), name: (device_gib, rates)}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({key: {"device_gib": gib, **asdict(found)} for key, (gib, found) in known.items()}, indent=1) + "\n")
        partial.replace(file)
    except OSError as error:
        raise UserError(f"the rates could not be kept in {file}: {error}. Set XDG_CACHE_HOME to a folder you can write to") from None
    return file


def _kept() -> dict[str, tuple[float, Rates]]:
    try:
        return _measured()
    except UserError:  # says to calibrate again, which this is
        return {}


def _measured() -> dict[str, tuple[float, Rates]]:
    """Name -> (GiB, rates) of the GPUs that were calibrated on this machine."""
    file, names = rates_file(), [field.name for field in fields(Rates)]
    try:
        found = json.loads(file.read_text())
        return {
            str(name): (_figure(one, "device_gib"), Rates(**{rate: _figure(one, rate) for rate in names}))
            for name, one in found.items()
            if {"device_gib", *names} <= one.keys()  # else of another version
        }
    except OSError:  # none
        return {}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{file} does not hold the rates of a machine ({error}): measure them again with `ebbtide rehearse --calibrate`, or delete the file"
        ) from None


def _figure(one: Mapping[str, Any], name: str) -> float:
    """What divides, and is divided by."""
    figure = float(one[name])
    if not 0.1 <= figure <= 1e18:
        raise ValueError(f"`{name}` is {one[name]}")
    return figure


def rates_for(name: str) -> tuple[Rates, str]:
    """Of the GPU that calls itself so, and where they come from."""
    measured = _measured()
    if name in measured:
        return measured[name][1], f"measured on this machine's {name}"
    key = _key(name)
    if key is None:
        return KNOWN[TAKEN_FOR][
            1
        ], f"those known of a {TAKEN_FOR.upper()}, for want of any of {name}: `ebbtide rehearse --calibrate` measures"
    return KNOWN[key][1], f"known figures of the {key.upper()}: `ebbtide rehearse --calibrate` measures this machine's"


def _key(name: str) -> str | None:
    """The known GPU that a name means, such as `NVIDIA A100-SXM4-40GB`, `RTX 4090` or `rtx4090`."""
    parts = re.sub(r"nvidia|geforce|rtx|a100(?=\d)", r" \g<0> ", name.lower())  # those that others are written onto
    words = set(re.split(r"[^a-z0-9]+", parts)) | {_plain(re.sub("nvidia|geforce|rtx", "", name.lower()))}
    if "a100" in words and words & {"40", "40gb"}:
        return "a100-40"
    return next((key for key in KNOWN if key in words), None)


def _plain(name: str) -> str:
    """Without spaces, dashes and case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def this_machine(name: str, device_bytes: int, host_bytes: int) -> Machine:
    """What a run finds: the GPU's own name, its memory and the host's."""
    rates, source = rates_for(name)
    return Machine(name, device_bytes / GIB, host_bytes / GIB, rates, source, links_for(name))


def cpu_machine(free_bytes: int, ranks: int = 1) -> Machine:
    """A CPU, with host and device as two pools of one memory, which so many ranks share. Its rates only order the ways there are."""
    return Machine(
        "CPU", free_bytes / ranks / GIB, free_bytes / GIB, KNOWN[TAKEN_FOR][1], "none of a CPU", links_for(TAKEN_FOR), timed=False
    )


def machine_for(
    gpu: str | None, device_gib: float | None, host_gib: float | None, link: float | None, network: float | None = None, node: int = 1
) -> Machine:
    """What is asked for on the command line: a GPU by name, and figures in place of its own. `link` and `network` in GB/s; `node`: GPUs of one that are used."""
    measured = _measured()
    if gpu is None and device_gib is None and len(measured) == 1:
        (gpu,) = measured
    if gpu is None and device_gib is None:
        found = f"calibrated here are {', '.join(measured)}" if measured else "no machine was calibrated here"
        raise UserError(f"name the GPU to plan for with `--gpu` (such as h200), or its memory with `--device-gib`: {found}")
    name, memory = TAKEN_FOR, device_gib or 0.0
    if gpu is not None:
        name, memory = _named(gpu, measured)
    rates, source = rates_for(name)
    links = links_for(name)
    if gpu is None:
        name, source = "GPU", f"those known of a {TAKEN_FOR.upper()}, as no GPU is named (`--gpu`)"
    if link is not None:
        rates = Rates(**{**asdict(rates), "link_out": link * 1e9, "link_in": link * 1e9})
    if network is not None:
        links = replace(links, far=network * 1e9)
    return Machine(name, device_gib or memory, host_gib or node * USUAL_HOST_GIB, rates, source, links)


def _named(gpu: str, measured: Mapping[str, tuple[float, Rates]]) -> tuple[str, float]:
    """(name, GiB): of one that was measured here, if that is meant; else of a known one."""
    key = _key(gpu)
    for name, (memory, _) in measured.items():
        if _plain(gpu) == _plain(name) or (key is not None and key == _key(name)):
            return name, memory
    if key is None:
        raise UserError(
            f"`--gpu {gpu}` is not known: {', '.join([*KNOWN, *measured])}; or give `--device-gib`, `--host-gib` and `--link` instead of `--gpu`"
        )
    return key, KNOWN[key][0]
