"""Measures the peak memory of SFT and GRPO with Qwen2.5-7B's shape in NF4 and --stream-layers, on device and host.

    python -m bench.seven                                          # JSON under bench/results
    python -m bench.seven --layers 2 --tokens 256 --algorithms sft # minutes rather than an hour

The weights are random. Each algorithm takes two optimizer steps on the CPU in bf16. Although all tensors are in the
CPU's memory, devices/live_tensors.py counts separately those that would be on the device and those that would be in the
host's memory.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save

from bench import records
from bench.memory import Case, run_command
from bench.options import RESULTS
from bench.shapes import write_tokenizer
from r3lite.core.files import read_record, write_json
from r3lite.devices.live_tensors import MIB, LiveTensors
from r3lite.devices.precision import Precision
from r3lite.memory.known_models import QWEN25
from r3lite.models import nf4
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.projections import Nf4Linear
from r3lite.models.weights import FINGERPRINT, layer_linears

SHAPE = QWEN25["Qwen/Qwen2.5-7B-Instruct"]
CASES = {
    "sft": Case(size="7B", algorithm="sft", tokens=2048, quantize="nf4", budget="3500MiB"),
    "grpo": Case(size="7B", algorithm="grpo", tokens=256, quantize="nf4", budget="3800MiB"),
}
# Random weights have about the magnitude of a real model's.
NORM_MEAN = 1  # of a norm's weights; the mean of all others is 0
WEIGHT_STD = 0.02
ABSMAX_SCALE = 1e-4
ABSMAX_MEAN = 0.03
SAFETENSORS_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, which takes this many bytes


def tensor_shapes(shape: ModelConfig) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    """Yields the name, shape and dtype of each tensor of a model folder in NF4."""
    with torch.device("meta"):
        model = CausalLM(shape)
    for path, linear in layer_linears(model).items():
        model.set_submodule(path, Nf4Linear(nf4.unfilled(linear.weight), linear.bias, torch.bfloat16))
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield name, tensor.shape, torch.bfloat16 if isinstance(tensor, torch.nn.Parameter) else tensor.dtype


def random_tensor(name: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Returns a tensor of random numbers for the tensor of that name in a model folder in NF4."""
    if dtype == torch.uint8:  # two codes of 4 bits
        return torch.randint(low=0, high=256, size=shape, dtype=dtype, generator=generator)
    if dtype == torch.int8:
        return torch.randint(low=-127, high=128, size=shape, dtype=dtype, generator=generator)
    if name.endswith(".absmax_scale"):
        return torch.full(shape, ABSMAX_SCALE)
    if name.endswith(".absmax_mean"):
        return torch.full(shape, ABSMAX_MEAN)
    mean = NORM_MEAN if "norm" in name else 0
    return torch.empty(shape, dtype=dtype).normal_(mean=mean, std=WEIGHT_STD, generator=generator)


def write_folder(folder: Path, shape: ModelConfig) -> str:
    """Writes a model folder in NF4 with random weights, with one tensor in memory at a time; returns its path.

    safetensors itself could only write all tensors at once. So the header of the file is written here, followed by the
    data of each tensor, which are taken from a safetensors file of that tensor alone.
    """
    write_tokenizer(folder, shape)
    config = read_record(folder / "config.json", remedy="").values
    write_json(folder / "config.json", config | {"quantization_config": nf4.LAYOUT})
    layouts = list(tensor_shapes(shape))
    header = {"__metadata__": {FINGERPRINT: "0" * 16}}
    dtype_names = {torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32", torch.bfloat16: "BF16"}
    end = 0
    for name, tensor_shape, dtype in layouts:
        start = end
        end = start + tensor_shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": dtype_names[dtype],
            "shape": list(tensor_shape),
            "data_offsets": [start, end],
        }
    header_bytes = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header_bytes).to_bytes(SAFETENSORS_LENGTH_BYTES, "little") + header_bytes)
        for name, tensor_shape, dtype in layouts:
            tensor = random_tensor(name=name, shape=tensor_shape, dtype=dtype, generator=generator)
            file_bytes = save({name: tensor})
            header_length = int.from_bytes(file_bytes[:SAFETENSORS_LENGTH_BYTES], "little")
            file.write(file_bytes[SAFETENSORS_LENGTH_BYTES + header_length :])
    return str(folder)


def measure(case: Case, folder: str, layers: int) -> dict:
    """Runs a case and returns its record: peaks of memory, and the planner's predictions of them."""
    precision = Precision(torch.bfloat16, torch.device("cpu"))
    with LiveTensors() as counter:
        plan, _ = run_command(case, folder, precision, ["--stream-layers"])
    peak = counter.peak / MIB
    planned = plan.allocated / MIB
    return {
        "algorithm": case.algorithm,
        "tokens": case.tokens,
        "layers": layers,
        "peak_mib": round(peak, 1),
        "planned_mib": round(planned, 1),
        "planned_off_percent": round(100 * (planned - peak) / peak, 1),
        "host_mib": round(counter.peak_host / MIB, 1),
        "planned_host_mib": round(plan.host / MIB, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SHAPE.num_hidden_layers)
    parser.add_argument("--algorithms", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", type=int, help="of a row, or sampled; by default 2,048 in SFT and 256 in GRPO")
    parser.add_argument("--folder", help="where weights are written, 0.1 GB a layer and 2.1 more")
    flags = parser.parse_args()
    precision = Precision(torch.bfloat16, torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=flags.folder) as temporary_folder:
        folder = write_folder(Path(temporary_folder) / "7b", replace(SHAPE, num_hidden_layers=flags.layers))
        cases = [
            replace(case, tokens=flags.tokens or case.tokens)
            for name, case in CASES.items()
            if name in flags.algorithms
        ]
        results = [measure(case, folder, flags.layers) for case in cases]
    path = RESULTS / "streaming.json"
    runs = [*records.read(path), {**records.provenance(precision), "records": results}]
    write_json(path, {"runs": runs})
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
