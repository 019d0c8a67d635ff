"""The best adapter of a given rank for a change of weights, dense or itself a product.

    D = U S V^T      A = V_r^T, B = U_r S_r      ||D - B A||_F^2 = sum_{j > r} S_j^2 (Eckart, Young 1936)

B takes all of S and the rows of A are orthonormal: near the size PEFT draws A with, so that training goes on at the
rates of an ordinary adapter. A component with S_j = 0 has a row of A to train B from; halves of S on each side would
leave it without gradient for good.

A product of a rank below min(d, k) is decomposed without making D: B = Q_B R_B, A^T = Q_A R_A, and the SVD of the core
R_B R_A^T, in O((d + k) r^2). In fp64. Signs: in each column of U the value of largest magnitude is positive. Components
of equal S are as LAPACK gives them, so whoever needs the same bits everywhere computes once and sends the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.lora.factors import Factors, require_matrix


def principal(change: Factors | Tensor, rank: int) -> tuple[Factors, Tensor]:
    """The `rank` first components, with scale 1 and by falling S: those of any lower rank are its first ones.

    Then the singular values, fp64: all that are not zero, and perhaps some that are. Where `rank` is above min(d, k)
    the rest of both factors is zero. InvalidUpdate if a dense change is not a finite matrix.
    """
    u, s, v = _decomposed(change, rank)
    u, v = u[:, :rank], v[:, :rank]
    u_at_largest = u.gather(0, u.abs().argmax(0, keepdim=True))
    signs = torch.where(u_at_largest < 0, -1.0, 1.0)
    a, b = (v * signs).T, u * signs * s[:rank]
    return Factors(a.float(), b.float(), 1.0).resized(rank, scale=1.0), s


def left_out(singular_values: Tensor, rank: int) -> float:
    """The share of a change that its `rank` first components do not have, in the Frobenius norm; 0 where it is 0."""
    total = float(singular_values.norm())
    return float(singular_values[rank:].norm()) / total if total else 0.0


def _decomposed(change: Factors | Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U [d, m], S [m] and V [k, m], fp64, with m at least min(rank, d, k)."""
    if isinstance(change, Tensor):
        require_matrix("the change", change)
        dense = change.double()
    else:
        width = max(change.rank, rank)
        if width < min(change.shape):
            return _decomposed_thin(change.resized(width, scale=change.scale))
        dense = change.scale * (change.b.double() @ change.a.double())
    u, s, vh = torch.linalg.svd(dense, full_matrices=False)
    return u, s, vh.T


def _decomposed_thin(change: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Householder's Q is orthonormal even where columns are zero: so what `resized` appended becomes usable too."""
    q_b, r_b = torch.linalg.qr(change.b.double() * change.scale)
    q_a, r_a = torch.linalg.qr(change.a.double().T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T)
    return q_b @ u, s, q_a @ vh.T
