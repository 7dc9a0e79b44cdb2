"""The memory and the rates of a machine, from which a plan predicts seconds. The rates are measured there
(`ebbtide rehearse --calibrate`) or known by the GPU's name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.system.units import gib


@dataclass(frozen=True)
class Rates:
    """Rates per second: bytes, operations or parameters."""

    matmul: float
    """Operations of a large matmul in 16 bits (FLOP/s)."""
    copy: float
    """Bytes read and written by a copy inside the device's memory."""
    link_out: float
    """Bytes of a pinned copy from the device to the host, over the host link (PCIe)."""
    link_in: float
    """Bytes of a pinned copy from the host to the device."""
    cpu_adam: float
    """Parameters in an optimizer step on the CPU."""
    host_op: float
    """Operations that Python launches on the device, which limits small batches."""


@dataclass(frozen=True)
class Links:
    """Links between GPUs: bytes per second that each GPU sends while it receives as many."""

    near: float
    """The rate to GPUs of the same node."""
    far: float
    """The rate to GPUs of other nodes, while all GPUs of the node send."""
    has_nvlink: bool
    """Whether the GPUs of a node are connected by NVLink, and not only by PCIe."""


@dataclass(frozen=True)
class Machine:
    """One GPU (or CPU) and its host, as a plan sees them."""

    name: str
    device_gib: float
    host_gib: float
    rates: Rates
    source: str
    """Where the rates come from, as a text for the user."""
    links: Links
    is_timed: bool = True
    """Whether seconds can be predicted; not for a CPU, whose small kernels follow no rate."""

    @property
    def has_grouped_matmul(self) -> bool:
        """Whether torch has grouped matmuls for experts on this GPU, without a synchronization with the host; only
        then is decoding with experts captured as a CUDA graph."""
        return _key(self.name) in GROUPED_MATMUL_GPUS


# The rates of the H200 are measured (benchmarks/plan.py). For the others, memory, matmul and copy are those of their
# data sheets, scaled by the H200's ratio of measured to data sheet (matmul 0.79, copy 0.87), and the host link is that
# of their PCIe generation. Hosts differ more than GPUs: 1.7 to 4.7 billion parameters per second were seen with the
# same kind of GPU, so an unknown host is assumed to be a slow one.
_H200 = Rates(matmul=786e12, copy=4.19e12, link_out=55.0e9, link_in=55.5e9, cpu_adam=2.85e9, host_op=140e3)


PEAK_TFLOPS: Mapping[str, float] = {
    "h200": 989, "b200": 2250, "h100": 989, "a100": 312, "a100-40": 312, "l40s": 362, "a6000": 155,
    "a10": 125, "l4": 121, "5090": 210, "4090": 165, "3090": 71,
}  # fmt: skip
"""The peak of dense bfloat16 matmuls by the data sheets, to which MFU refers."""


def peak_flops(name: str) -> float | None:
    """The peak FLOP/s of the GPU with this name; None if it is not known."""
    key = _key(name)
    return PEAK_TFLOPS[key] * 1e12 if key is not None else None


def _sheet(name: str, copy: float, link: float) -> Rates:
    """The rates from a data sheet: `copy` in TB/s, `link` in GB/s."""
    return Rates(
        0.79 * PEAK_TFLOPS[name] * 1e12,
        0.87 * copy * 1e12,
        link * 1e9,
        link * 1e9,
        cpu_adam=_H200.cpu_adam,
        host_op=_H200.host_op,
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
"""The GiB that a process can allocate, and the rates, by the name of the GPU."""

GROUPED_MATMUL_GPUS = {"h100", "h200", "b200"}

# The links between GPUs are not measured. The figures, in GB/s per direction to (the same node, other nodes), are those
# of the data sheets: NVLink 3, 4 and 5, otherwise PCIe; a network of 200 or 400 Gb/s per GPU where nodes are sold with
# one, otherwise 100. The fraction of them that is reached is an assumption.
LINK_EFFICIENCY = 0.8
_PCIE = {"5090": 50.0}
_NVLINK = {
    "b200": (900.0, 50.0),
    "h200": (450.0, 50.0),
    "h100": (450.0, 50.0),
    "a100": (300.0, 25.0),
    "a100-40": (300.0, 25.0),
}


def links_for(name: str) -> Links:
    """The links of the GPU with this name."""
    key = _key(name) or DEFAULT_GPU
    near, far = _NVLINK.get(key, (_PCIE.get(key, 25.0), 12.5))
    return Links(LINK_EFFICIENCY * near * 1e9, LINK_EFFICIENCY * far * 1e9, key in _NVLINK)


USUAL_HOST_GIB = 128.0  # Host memory per GPU of a node.
USUAL_GPUS_PER_NODE = 8
DEFAULT_GPU = "3090"  # An unknown GPU is assumed to have the rates of this one.


def rates_file() -> Path:
    """The file with the measured rates of this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbtide" / "rates.json"


def save_rates(name: str, device_gib: float, rates: Rates) -> Path:
    """Adds the rates measured on the GPU with this name to the file of rates."""
    file = rates_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        known = {**_measured_or_empty(), name: (device_gib, rates)}
        partial = file.with_suffix(".partial")
        partial.write_text(
            json.dumps({key: {"device_gib": gib, **asdict(found)} for key, (gib, found) in known.items()}, indent=1)
            + "\n"
        )
        partial.replace(file)
    except OSError as error:
        raise UserError(
            f"the rates could not be written to {file}: {error}. Set XDG_CACHE_HOME to a folder you can write to"
        ) from None
    return file


def _measured_or_empty() -> dict[str, tuple[float, Rates]]:
    try:
        return _measured()
    except UserError:  # It advises to calibrate again, which is what happens here.
        return {}


def _measured() -> dict[str, tuple[float, Rates]]:
    """The GiB and the rates of the GPUs that were calibrated on this machine, by name."""
    file, names = rates_file(), [field.name for field in fields(Rates)]
    try:
        found = json.loads(file.read_text())
        return {
            str(name): (_figure(one, "device_gib"), Rates(**{rate: _figure(one, rate) for rate in names}))
            for name, one in found.items()
            if {"device_gib", *names} <= one.keys()  # Otherwise the entry is from another version.
        }
    except OSError:  # There is no such file.
        return {}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{file} does not contain the rates of a machine ({error}): measure them again with `ebbtide rehearse"
            " --calibrate`, or delete the file"
        ) from None


def _figure(one: Mapping[str, Any], name: str) -> float:
    """A figure of the file, checked to be usable as a divisor."""
    figure = float(one[name])
    if not 0.1 <= figure <= 1e18:
        raise ValueError(f"`{name}` is {one[name]}")
    return figure


def rates_for(name: str) -> tuple[Rates, str]:
    """The rates of the GPU with this name, and where they come from."""
    measured = _measured()
    if name in measured:
        return measured[name][1], f"measured on this machine's {name}"
    key = _key(name)
    if key is None:
        return (
            KNOWN[DEFAULT_GPU][1],
            f"known figures of a {DEFAULT_GPU.upper()}, because there are none for {name}: `ebbtide rehearse"
            " --calibrate` measures this machine",
        )
    return KNOWN[key][1], f"known figures of the {key.upper()}: `ebbtide rehearse --calibrate` measures this machine"


def _key(name: str) -> str | None:
    """The known GPU that a name stands for, such as `NVIDIA A100-SXM4-40GB`, `RTX 4090` or `rtx4090`."""
    # These words may be written without a space to the next.
    parts = re.sub(r"nvidia|geforce|rtx|a100(?=\d)", r" \g<0> ", name.lower())
    words = set(re.split(r"[^a-z0-9]+", parts)) | {_plain(re.sub("nvidia|geforce|rtx", "", name.lower()))}
    if "a100" in words and words & {"40", "40gb"}:
        return "a100-40"
    return next((key for key in KNOWN if key in words), None)


def _plain(name: str) -> str:
    """The name in lower case, without spaces and dashes."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def this_machine(name: str, device_bytes: int, host_bytes: int) -> Machine:
    """The machine of a run, from the GPU's own name, its memory and the host's."""
    rates, source = rates_for(name)
    return Machine(name, gib(device_bytes), gib(host_bytes), rates, source, links_for(name))


def cpu_machine(free_bytes: int, ranks: int = 1) -> Machine:
    """A CPU as a machine: host and device are two pools of one memory, which `ranks` share. Its rates only serve to
    rank plans."""
    return Machine(
        "CPU",
        gib(free_bytes / ranks),
        gib(free_bytes),
        KNOWN[DEFAULT_GPU][1],
        "none for a CPU",
        links_for(DEFAULT_GPU),
        is_timed=False,
    )


def machine_for(
    gpu: str | None,
    device_gib: float | None,
    host_gib: float | None,
    link: float | None,
    network: float | None = None,
    node: int = 1,
) -> Machine:
    """The machine named on the command line: a GPU by name, and figures that replace its known ones. `link` and
    `network` are in GB/s; `node` is the number of GPUs of a node that are used."""
    measured = _measured()
    if gpu is None and device_gib is None and len(measured) == 1:
        (gpu,) = measured
    if gpu is None and device_gib is None:
        found = f"calibrated here: {', '.join(measured)}" if measured else "no GPU was calibrated here"
        raise UserError(
            f"name the GPU to plan for with `--gpu` (such as h200), or its memory with `--device-gib`: {found}"
        )
    name, memory = DEFAULT_GPU, device_gib or 0.0
    if gpu is not None:
        name, memory = _named(gpu, measured)
    rates, source = rates_for(name)
    links = links_for(name)
    if gpu is None:
        name, source = "GPU", f"known figures of a {DEFAULT_GPU.upper()}, because no GPU is named (`--gpu`)"
    if link is not None:
        rates = Rates(**{**asdict(rates), "link_out": link * 1e9, "link_in": link * 1e9})
    if network is not None:
        links = replace(links, far=network * 1e9)
    return Machine(name, device_gib or memory, host_gib or node * USUAL_HOST_GIB, rates, source, links)


def _named(gpu: str, measured: Mapping[str, tuple[float, Rates]]) -> tuple[str, float]:
    """The name and the GiB of the measured GPU that `gpu` stands for, otherwise of the known one."""
    key = _key(gpu)
    for name, (memory, _) in measured.items():
        if _plain(gpu) == _plain(name) or (key is not None and key == _key(name)):
            return name, memory
    if key is None:
        raise UserError(
            f"`--gpu {gpu}` is not known: choose from {', '.join([*KNOWN, *measured])}; or give `--device-gib`,"
            " `--host-gib` and `--link` instead of `--gpu`"
        )
    return key, KNOWN[key][0]
