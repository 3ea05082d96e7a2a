"""Peak memory of SFT and GRPO on Qwen2.5-7B's shape in NF4 with --stream-layers: the device's part and the host's.

    python -m bench.seven                                          # JSON under bench/results
    python -m bench.seven --layers 2 --tokens 256 --algorithms sft # minutes rather than an hour

The weights are random codes, written tensor by tensor. Two optimizer steps are run on the CPU in bf16, where the
tensors in the host's memory are counted apart (devices/live_tensors.py).
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
CASES = {"sft": Case("7B", "sft", 2048, "nf4", "3500MiB"), "grpo": Case("7B", "grpo", 256, "nf4", "3800MiB")}


def tensors(shape: ModelConfig) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    with torch.device("meta"):
        model = CausalLM(shape)
    for path, linear in layer_linears(model).items():
        model.set_submodule(path, Nf4Linear(nf4.unfilled(linear.weight), linear.bias, torch.bfloat16))
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield name, tensor.shape, torch.bfloat16 if isinstance(tensor, torch.nn.Parameter) else tensor.dtype


def filled(name: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of about the size of a model's."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, generator=generator)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, generator=generator)
    if name.endswith((".absmax_scale", ".absmax_mean")):
        return torch.full(shape, 1e-4 if name.endswith("scale") else 0.03)
    return torch.empty(shape, dtype=dtype).normal_("norm" in name, 0.02, generator=generator)


def write_folder(where: Path, shape: ModelConfig) -> str:
    """Makes the model folder, one tensor in memory at a time; returns its name."""
    write_tokenizer(where, shape)
    config = read_record(where / "config.json", remedy="").values
    write_json(where / "config.json", config | {"quantization_config": nf4.LAYOUT})
    sizes, header, end = list(tensors(shape)), {"__metadata__": {FINGERPRINT: "0" * 16}}, 0
    names = {torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32", torch.bfloat16: "BF16"}
    for name, size, dtype in sizes:
        start, end = end, end + size.numel() * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(size), "data_offsets": [start, end]}
    generator, text = torch.Generator().manual_seed(0), json.dumps(header).encode()
    with (where / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size, dtype in sizes:
            body = save({name: filled(name, size, dtype, generator)})
            file.write(body[8 + int.from_bytes(body[:8], "little") :])
    return str(where)


def measure(case: Case, folder: str, layers: int) -> dict:
    precision = Precision(torch.bfloat16, torch.device("cpu"))
    with LiveTensors() as counter:
        plan = run_command(case, folder, precision, ["--stream-layers"])[0]
    peak, planned = counter.peak / MIB, plan.allocated / MIB
    found = {"algorithm": case.algorithm, "tokens": case.tokens, "layers": layers}
    found |= {"peak_mib": round(peak, 1), "planned_mib": round(planned, 1)}
    found |= {"planned_off_percent": round(100 * (planned - peak) / peak, 1)}
    return found | {"host_mib": round(counter.peak_host / MIB, 1), "planned_host_mib": round(plan.host / MIB, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SHAPE.num_hidden_layers)
    parser.add_argument("--algorithms", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", type=int, help="of a row, or sampled; by default 2,048 in SFT and 256 in GRPO")
    parser.add_argument("--folder", help="where weights are written, 0.1 GB a layer and 2.1 more")
    flags = parser.parse_args()
    precision = Precision(torch.bfloat16, torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=flags.folder) as where:
        folder = write_folder(Path(where) / "7b", replace(SHAPE, num_hidden_layers=flags.layers))
        cases = [
            replace(case, tokens=flags.tokens or case.tokens)
            for name, case in CASES.items()
            if name in flags.algorithms
        ]
        found = [measure(case, folder, flags.layers) for case in cases]
    path = RESULTS / "streaming.json"
    runs = [*records.read(path), {**records.provenance(precision), "records": found}]
    write_json(path, {"runs": runs})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
