"""The import direction, file sizes and the words that the design fixes."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    p for package in ("clover_jax", "pallas_kernels") for p in (ROOT / package).rglob("*.py")
)
# A module may import from its own layer and those to its left.
LAYERS = [
    ("pallas_kernels",),
    ("clover_jax.errors", "clover_jax.files", "clover_jax.config", "clover_jax.presets",
     "clover_jax.ablations", "clover_jax.params", "clover_jax.env", "clover_jax.sharding",
     "clover_jax.cache"),
    ("clover_jax.model",),
    ("clover_jax.data", "clover_jax.checkpoint"),
    ("clover_jax.diffusion",),
    ("clover_jax.train", "clover_jax.serve", "clover_jax.eval", "clover_jax.verify",
     "clover_jax.plan"),
    ("clover_jax.cli",),
]  # fmt: skip
# Samples and their layout with noise are the diffusion package's, and data is below it otherwise.
ALLOWED = {
    (f"clover_jax.data.{name}", "clover_jax.diffusion.corrupt")
    for name in ("pipeline", "traces", "trace_batches")
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def layer(module: str) -> int | None:
    for i, names in enumerate(LAYERS):
        if any(module == n or module.startswith(n + ".") for n in names):
            return i
    return None


def test_imports_point_one_way():
    wrong = [
        (module_name(path), target)
        for path in SOURCES
        for target in imports(path)
        if (own := layer(module_name(path))) is not None
        and (other := layer(target)) is not None
        and other > own
        and not any(
            module_name(path) == a and (target == b or target.startswith(b + "."))
            for a, b in ALLOWED
        )
    ]
    assert wrong == []


def test_every_module_has_a_layer():
    homeless = [m for p in SOURCES if layer(m := module_name(p)) is None and m != "clover_jax"]
    assert homeless == []


def test_references_import_no_sibling():
    for path in (ROOT / "pallas_kernels").rglob("reference.py"):
        assert not [t for t in imports(path) if t.startswith("pallas_kernels")], path


def test_kernels_know_no_configs():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        assert not [t for t in imports(path) if t.startswith("clover_jax")], path


def test_files_are_short():
    long = {p.name: n for p in SOURCES if (n := len(p.read_text().splitlines())) > 600}
    assert long == {}
