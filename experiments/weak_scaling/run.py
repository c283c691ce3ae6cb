"""Weak scaling by counting: what one device holds, moves, computes and sends, on 1 to 256 devices.

    uv run --extra experiments python experiments/weak_scaling/run.py

Every device brings its own work: serving, one row of 32,768 tokens; training, one row of 4,096.
Bytes held are counted from shapes and shardings (`clover_jax.plan.memory`), weights read as in the
speed floor. Collectives and operations are formulas, written out below; the compiler's counts for
64 devices stand beside them in `experiments/mesh_plans`. Writes points.json and weak_scaling.png.
"""

import json
from pathlib import Path
from typing import Any

from clover_jax.config import ModelConfig
from clover_jax.eval.card_report import require_pyplot
from clover_jax.plan import floor, memory
from clover_jax.plan.devices import AS_IS
from clover_jax.plan.floor import Load
from clover_jax.plan.memory import ROUTED, planned_env, whole
from clover_jax.presets import clover_35b_a3b
from clover_jax.sharding import PRESETS
from clover_jax.train.step import OptimiserConfig

HERE = Path(__file__).parent
DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT, TRAINED = 32_768, 4_096
VIEWS = 2  # noisy views of every token in training
# Devices that share the experts, at most; more devices are more groups with all experts. To train
# they are few: what a group sends for its experts grows with its size.
GROUP = {"serve": 64, "train": 8}


def mesh_of(devices: int, mode: str) -> tuple[int, int, int]:
    """(data, expert, tensor): experts first, then data. Heads stay whole."""
    expert = min(devices, GROUP[mode])
    return devices // expert, expert, 1


def matmul_parameters(cfg: ModelConfig) -> int:
    """Parameters that one token is multiplied with: all but the table and the other experts."""
    parts = memory.weights(cfg.replace(dtype="float32"), _env((1, 1, 1), "tensor"), AS_IS)
    share = cfg.moe.top_k / cfg.moe.num_experts
    kept = (
        p.total * share if n == ROUTED else p.total for n, p in parts.items() if n != "embedding"
    )
    return round(sum(kept)) // 4


def expert_traffic(cfg: ModelConfig, mesh: tuple[int, int, int], tokens: int) -> int:
    """Bytes a device sends in a forward pass for its own `tokens`: gathered in, scattered out.

    The rows of an expert group are gathered by each of its n devices and their sums scattered: a
    ring moves n - 1 times a device's rows each way, in every layer.
    """
    row = cfg.hidden_size * 2
    return 2 * cfg.num_layers * (mesh[1] - 1) * tokens * row


def serve(cfg: ModelConfig, devices: int) -> dict[str, float]:
    """A preview of one block per device."""
    mesh = mesh_of(devices, "serve")
    env = _env(mesh, "tensor")
    load = Load(cfg=cfg, env=env, form=AS_IS, rows=devices, context=CONTEXT)
    weights = memory.weights(cfg, env, AS_IS)
    cache = memory.caches(cfg, devices, CONTEXT, env)
    group = cfg.block_length * devices // mesh[0]
    moved = floor.traffic(load, "preview", floor.expected_experts(cfg, group))
    a = cfg.attention
    attention = 4 * cfg.num_groups * a.num_heads * a.head_dim * CONTEXT  # scores and values
    return {
        "weights": whole(weights.values()).device,
        "cache": whole(cache.values()).device,
        "read per preview": moved.total,
        "sent per preview": expert_traffic(cfg, mesh, cfg.block_length),
        "operations per preview": cfg.block_length * (2 * matmul_parameters(cfg) + attention),
    }


def train(cfg: ModelConfig, devices: int) -> dict[str, float]:
    """A step of one row per device: a clean stream and two noisy views, layers recomputed."""
    mesh = mesh_of(devices, "train")
    optimiser = OptimiserConfig(learning_rate=1e-4, steps=1000)
    env = _env(mesh, "fsdp")
    state = memory.training(cfg, optimiser, env)
    tokens = TRAINED * (1 + VIEWS)
    data = mesh[0]
    # Forward, recomputed forward and backward gather the experts' rows; over the data axis fsdp
    # gathers bf16 weights for the two forwards and scatters float32 gradients once; those of the
    # unsplit weights are added over the expert axis, too.
    parts = memory.training(cfg, optimiser, _env((1, *mesh[1:]), "fsdp"))
    masters = parts["float32 masters"].device
    weights = memory.weights(cfg, _env((1, 1, 1), "fsdp"), AS_IS)
    shared = 2 * sum(p.device for n, p in weights.items() if n != ROUTED)  # as float32
    sent = 3 * expert_traffic(cfg, mesh, tokens)
    sent += (2 * masters / 2 + masters) * (data - 1) / data
    sent += 2 * shared / data * (mesh[1] - 1) / mesh[1]
    a = cfg.attention
    seen = TRAINED / 2 * (1 + VIEWS)  # cells per token and stream, in the mean
    attention = 4 * cfg.num_groups * a.num_heads * a.head_dim * seen * TRAINED
    return {
        "masters": state["float32 masters"].device,
        "optimiser": state["optimiser state"].device,
        "gradients": state[memory.GRADIENTS].device,
        "sent per step": sent,
        # forward 1, recomputed 1, backward 2
        "operations per step": 4 * (2 * tokens * matmul_parameters(cfg) + attention),
    }


def draw(points: dict[str, list[dict[str, float]]], path: Path) -> None:
    """One row of panels for each mode: bytes held, bytes moved, operations."""
    pyplot = require_pyplot()
    figure, panels = pyplot.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    for row, (mode, found) in zip(panels, points.items(), strict=True):
        names = list(found[0])
        held = [n for n in names if " per " not in n]
        moved = [n for n in names if n.startswith(("read", "sent"))]
        work = [n for n in names if n.startswith("operations")]
        for axes, chosen, unit, scale in zip(
            row, (held, moved, work), ("GB", "GB", "TFLOP"), (1e9, 1e9, 1e12), strict=True
        ):
            for name in chosen:
                shown = [p[name] / scale for p in found]
                axes.plot(DEVICES, shown, marker="o", markersize=3, label=name)
            axes.set_xscale("log", base=2)
            axes.set_xticks(DEVICES, DEVICES)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{mode}: {unit} per device", fontsize=10)
            axes.legend(fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("devices")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(mode: str, points: list[dict[str, float]]) -> str:
    """Markdown; GB, and TFLOP for operations."""
    names = list(points[0])
    lines = ["| devices | mesh | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for devices, point in zip(DEVICES, points, strict=True):
        cells = (
            f"{v / 1e12:.2f}" if n.startswith("operations") else f"{v / 1e9:.2f}"
            for n, v in point.items()
        )
        mesh = "x".join(map(str, mesh_of(devices, mode)))
        lines.append(f"| {devices} | {mesh} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _env(mesh: tuple[int, int, int], rules: str) -> Any:
    return planned_env(mesh, PRESETS[rules])


def main() -> None:
    """The command line; see the module's docstring."""
    cfg = clover_35b_a3b()
    points = {
        "serve": [serve(cfg, n) for n in DEVICES],
        "train": [train(cfg, n) for n in DEVICES],
    }
    (HERE / "points.json").write_text(json.dumps({"devices": DEVICES, **points}, indent=1) + "\n")
    draw(points, HERE / "weak_scaling.png")
    for mode, found in points.items():
        print(f"\n{mode}\n\n{table(mode, found)}")


if __name__ == "__main__":
    main()
