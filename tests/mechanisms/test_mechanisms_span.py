"""Bases of spans from inner products, against the vectors themselves."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.mechanisms.machinery.vmf_sampling import Basis, spectral_basis, triangular_basis
from tests.cases import in_one_test

EPS = float(torch.finfo(torch.float64).eps)


def directions(case: str, dimension: int = 12) -> Tensor:
    """Unit vectors as rows."""
    rows = torch.randn(5, dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    if case == "duplicates":
        rows[3] = 2 * rows[0]
    if case == "opposite":
        rows[3] = -rows[0]
    if case == "plane":
        rows = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9)) @ rows[:2]
    if case == "close":
        rows[3] = rows[0] + 1e-3 * rows[3]
    return rows / rows.norm(dim=1, keepdim=True)


def assert_basis(basis: Basis, rows: Tensor, rank: int, tolerance: float) -> None:
    """Check the bases of groups of rows, (G, n, K)."""
    vectors = basis.combination.mT @ rows
    assert basis.rank == rank
    assert torch.allclose(vectors @ vectors.mT, torch.eye(rank, dtype=torch.float64), rtol=0, atol=tolerance)
    assert torch.allclose(basis.coordinates.mT @ vectors, rows, rtol=0, atol=tolerance)
    assert torch.allclose(basis.coordinates.norm(dim=1), torch.ones(rows.shape[:2], dtype=torch.float64))


@in_one_test(("case", "rank"), [("independent", 5), ("duplicates", 4), ("opposite", 4), ("plane", 2), ("close", 5)])
def test_spectral(case: str, rank: int) -> None:
    rows = directions(case)
    assert_basis(spectral_basis(rows @ rows.T, 12, 1e-12), rows[None], rank, 1e-9)


def test_a_matrix_on_which_lapack_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows one that fails everywhere: here every one does. The draws are those of the same spans."""
    rows = {case: directions(case) for case in ("independent", "duplicates", "plane", "close")}
    usual = {case: spectral_basis(rows[case] @ rows[case].T, 12, 1e-12) for case in rows}

    def fails(matrix: Tensor) -> tuple[Tensor, Tensor]:
        raise torch.linalg.LinAlgError(f"{len(matrix)} rows: the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    for case, basis in usual.items():
        found = spectral_basis(rows[case] @ rows[case].T, 12, 1e-12)
        assert_basis(found, rows[case][None], basis.rank, 1e-9)
        assert torch.allclose(found.coordinates, basis.coordinates, rtol=0, atol=1e-9)


@in_one_test("case", ["independent", "duplicates", "plane", "close"])
@in_one_test("absent", [(0,), (1, 2), (0, 2, 4)])
def test_vectors_of_zeros_have_no_coordinates(case: str, absent: tuple[int, ...]) -> None:
    """Exactly none: what rounding leaves of them must not be taken for a direction."""
    rows = directions(case)
    rows[list(absent)] = 0
    basis = spectral_basis(rows @ rows.T, 12, 1e-12)
    assert float(basis.coordinates[0][:, list(absent)].abs().max()) == 0
    others = [number for number in range(5) if number not in absent]
    assert torch.allclose(basis.coordinates[0][:, others].norm(dim=0), torch.ones(len(others), dtype=torch.float64))
    assert torch.allclose(basis.coordinates[0].T @ basis.combination[0].T @ rows, rows, rtol=0, atol=1e-9)


@in_one_test("cases", [("independent",), ("close",), ("close", "independent", "independent")])
def test_triangular(cases: tuple[str, ...]) -> None:
    rows = torch.stack([directions(case) for case in cases])
    basis = triangular_basis(rows @ rows.mT, 1e-12)
    assert basis is not None
    assert_basis(basis, rows, 5, 1e-9)


@in_one_test("case", ["duplicates", "opposite", "plane"])
@in_one_test("others", [0, 2])
def test_triangular_refuses_dependent_vectors(case: str, others: int) -> None:
    """Also when only one of some groups has them."""
    rows = torch.stack([*(directions("independent") for _ in range(others)), directions(case)])
    assert triangular_basis(rows @ rows.mT, 1e-12) is None


@in_one_test("angle", [1e-1, 1e-2, 1e-3])
def test_triangular_proves_its_bound(angle: float) -> None:
    """Two vectors at a small angle: the smallest eigenvalue is 1 - cos(angle), the bound is within a factor of 4."""
    rows = torch.tensor([[1.0, 0.0], [np.cos(angle), np.sin(angle)]], dtype=torch.float64)
    smallest, products = 1 - np.cos(angle), (rows @ rows.T)[None]
    assert triangular_basis(products, smallest * 1.01) is None
    assert triangular_basis(products, smallest / 4) is not None


def test_rank_is_at_most_the_dimension() -> None:
    rows = directions("independent", 3)
    assert_basis(spectral_basis(rows @ rows.T, 3, 0.0), rows[None], 3, 1e-12)


def test_no_vectors() -> None:
    empty = torch.zeros(0, 0, dtype=torch.float64)
    assert spectral_basis(empty, 4, EPS).rank == 0
    basis = triangular_basis(empty[None], EPS)
    assert basis is not None
    assert basis.rank == 0
