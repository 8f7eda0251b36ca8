"""Golden outputs of RA and LARA for given random numbers, which the Rust tests read: `randomized.safetensors`, f64:

    q (2, 2, 10, 8), k, v (2, 2, 14, 8); softmax: softmax attention (2, 2, 10, 8)
    lara_normals (2, 2, 4, 8): noise of four landmarks
    lara, lara_balance: LARA with query-specific weights, and with balance weights
    lara_means: as lara, but each sample is at the mean of its proposal, without noise
    ra_uniforms (2, 2, 3, 10), ra_normals (2, 2, 3, 10, 8): three samples for every query; ra: their mean

`python -m tidegate_experiments.bidirectional_fixture` rewrites it in the repository.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .randomized import lara, ra


def figures() -> dict[str, Tensor]:
    """Returns the tensors, which are always the same."""
    gen = torch.Generator().manual_seed(3000)
    normal = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    q, k, v = normal(2, 2, 10, 8) * 1.3, normal(2, 2, 14, 8) * 1.3, normal(2, 2, 14, 8)
    noise, normals = normal(2, 2, 4, 8), normal(2, 2, 3, 10, 8)
    uniforms = torch.rand(2, 2, 3, 10, generator=gen, dtype=torch.float64)
    samples_first = lambda x: x.movedim(2, 0)
    return {
        "q": q, "k": k, "v": v,
        "softmax": torch.matmul((torch.matmul(q, k.transpose(-1, -2)) * 8**-0.5).softmax(-1), v),
        "lara_normals": noise,
        "lara": lara(q, k, v, noise.unsqueeze(2), "query-specific"),
        "lara_balance": lara(q, k, v, noise.unsqueeze(2), "balance"),
        "lara_means": lara(q, k, v, torch.zeros_like(noise).unsqueeze(2), "query-specific"),
        "ra_uniforms": uniforms, "ra_normals": normals,
        "ra": ra(q, k, v, samples_first(uniforms), samples_first(normals)),
    }


def write(out: Path) -> None:
    """Writes the file into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in figures().items()}, out / "randomized.safetensors")
    (out / "randomized.safetensors").chmod(0o644)


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2] / "tests" / "fixtures")
