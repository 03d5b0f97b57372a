"""Draws of blocks by a program for GPUs, run by Triton's interpreter where there is none: its cipher against another
implementation, its numbers against their laws, and its sums against adding up one draw after another.

All seeds are fixed. Each case raises a false alarm with probability ALARM had they been random.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats
from sum_comparison import Floats, gradients, smallest_pvalue
from vmf_oracle import angle_law, draw_sums

from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms.machinery import block_sum as block_sum_module
from fedpriv.mechanisms.machinery.block_sum import makes_programs
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.cases import in_one_test
from tests.noise import stream

triton = pytest.importorskip("triton", reason="Triton comes with torch for Linux and a GPU")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from fedpriv.mechanisms.machinery import block_kernel  # noqa: E402

ALARM = 1e-4
KEY = np.frombuffer(b"0123456789abcdefghijklmnopqrstuv", dtype=np.uint32)
NUMBERS = 1 << 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _patched_once(fn: Callable[..., object], patch: Callable[..., object] = interpreter._patch_lang) -> object:
    """The interpreter patches its language at each call of a function, which takes longer than the function."""
    languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    done = not any(tl.core.is_builtin(language.arange) for language in languages)
    kept = getattr(interpreter, "_LangPatchScope", lambda: None)  # before Triton 3.4 nothing was undone
    return kept() if done else patch(fn)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes as long for a large program as for a small one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(block_sum_module, "makes_programs", lambda device: True)
        monkeypatch.setattr(block_kernel, "NUMBERS", NUMBERS)
        monkeypatch.setattr(interpreter, "_patch_lang", _patched_once)
    with np.errstate(divide="ignore", invalid="ignore"):  # of branches that are not taken
        yield


def _one_program(monkeypatch: pytest.MonkeyPatch, blocks: int, length: int) -> None:
    """No larger than it has to be."""
    if DEVICE == "cpu":
        monkeypatch.setattr(block_kernel, "NUMBERS", blocks * triton.next_power_of_2(max(16, length)))


@triton.jit
def _write_words(out, key, row, example, part, call, ROUNDS: tl.constexpr):
    rows = row + tl.arange(0, 1)
    words = block_kernel.cipher(key, rows, example + tl.arange(0, 1), part + tl.arange(0, 1), call, ROUNDS)
    for number in tl.static_range(16):
        tl.store(out + number + tl.arange(0, 1), words[number].to(tl.int32, bitcast=True))


def reference(counter: tuple[int, ...], rounds: int) -> list[int]:
    """A block of ChaCha as RFC 8439 describes it, in whole numbers."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *map(int, KEY), *counter]
    state = list(start)
    columns = [(k, k + 4, k + 8, k + 12) for k in range(4)]
    diagonals = [(k, 4 + (k + 1) % 4, 8 + (k + 2) % 4, 12 + (k + 3) % 4) for k in range(4)]
    for _ in range(rounds // 2):
        for a, b, c, d in columns + diagonals:
            for to, by, mixed, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                state[to] = (state[to] + state[by]) % 2**32
                word = state[mixed] ^ state[to]
                state[mixed] = (word << turn) % 2**32 | word >> (32 - turn)
    return [(left + right) % 2**32 for left, right in zip(start, state, strict=True)]


@pytest.mark.parametrize("rounds", [8, 12, 20])
def test_cipher(rounds: int) -> None:
    """Of 20 rounds there is another implementation, which the reference is compared with, too."""
    counter = (7, 1_000_003, 2, 12)
    out = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    _write_words[(1,)](out, torch.tensor(KEY.view(np.int32), device=DEVICE), *counter, ROUNDS=rounds)
    assert out.cpu().numpy().view(np.uint32).tolist() == reference(counter, rounds)
    nonce = np.array(counter, dtype=np.uint32).tobytes()
    theirs = Cipher(algorithms.ChaCha20(KEY.tobytes(), nonce), None).encryptor().update(bytes(64))
    assert reference(counter, 20) == np.frombuffer(theirs, dtype=np.uint32).tolist()


@triton.jit
def _write_normal(out, key, call, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.arange(0, ROWS)
    numbers = block_kernel.normal(key, row, tl.zeros_like(row), call, WIDTH)
    tl.store(out + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], numbers)


def test_normal_numbers() -> None:
    """Each column against the normal law, neighbours and other rows for independence of signs and sizes."""
    out = torch.zeros(2048, 32, device=DEVICE)
    _write_normal[(1,)](out, torch.tensor(KEY.view(np.int32), device=DEVICE), 3, ROWS=2048, WIDTH=32)
    numbers = out.double().cpu().numpy()
    assert min(stats.kstest(column, "norm").pvalue for column in numbers.T) > ALARM / 32
    assert stats.kstest(numbers.ravel(), "norm").pvalue > ALARM
    for made in (numbers, numbers**2):
        related = np.corrcoef(made.T)[np.triu_indices(32, 1)] * math.sqrt(len(made))
        assert 2 * stats.norm.sf(np.abs(related).max()) > ALARM / len(related) / 2


@triton.jit
def _write_shares(out, words, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    word = tl.load(words + place).to(tl.uint32, bitcast=True)
    across, up = block_kernel.on_circle(word)
    tl.store(out + place, across)
    tl.store(out + COUNT + place, up)
    tl.store(out + 2 * COUNT + place, block_kernel.uniform(word, word))


def test_points_of_the_circle_and_uniform_numbers() -> None:
    """Every eighth of the circle, its ends included: each point once, on the circle up to rounding."""
    eighths, places = np.meshgrid(np.arange(8), np.concatenate([np.arange(64), (1 << 21) - 1 - np.arange(64)]))
    words = ((eighths.ravel() << 29) | (places.ravel() << 8)).astype(np.uint32)
    words[:2] = 0, 2**32 - 1
    out = torch.zeros(3, len(words), device=DEVICE)
    _write_shares[(1,)](out, torch.tensor(words.view(np.int32), device=DEVICE), COUNT=len(words))
    across, up, shares = out.double().cpu().numpy()
    assert np.abs(np.hypot(across, up) - 1).max() < 2e-7
    angle = np.arctan2(np.minimum(np.abs(across), np.abs(up)), np.maximum(np.abs(across), np.abs(up)))
    within = ((words >> 8) & ((1 << 21) - 1)) + 0.5
    assert np.abs(angle - within * math.pi / 4 / 2**21).max() < 2e-7
    octants = {tuple(sides) for sides in np.stack([across > 0, up > 0, np.abs(up) > np.abs(across)], axis=1)}
    assert len(octants) == 8
    assert shares[0] == 2.0**-41
    assert shares[1] == 1 - 2.0**-24


@pytest.fixture
def _small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many numbers for a program as on a GPU; two rounds of the cipher, of which tests of places need no more."""
    monkeypatch.setattr(block_kernel, "NUMBERS", 512)
    if DEVICE == "cpu":
        monkeypatch.setattr(block_kernel, "ROUNDS", tl.constexpr(2))


def released(rows: Floats, kappa: float, length: int, seed: int, chunk_bytes: int = 1 << 28) -> Floats:
    """The sum, with a border between tensors in the middle, which may be inside a block or at the end of one."""
    cut = rows.shape[1] // 2
    parts = {"a": rows[:, :cut], "b": rows[:, cut:]}
    tensors = {name: torch.tensor(part, dtype=torch.float32, device=DEVICE) for name, part in parts.items()}
    operator = DenseGradients({name: value for name, value in tensors.items() if value.numel()}, "", chunk_bytes)
    made = VmfMechanism(kappa, f"size:{length}").release(operator, 1, stream(seed))
    return torch.cat([value.flatten() for value in made.values()]).double().cpu().numpy()


@pytest.mark.parametrize("length", [2, 17, 256])
@in_one_test("kappa", [0.0, 0.5, 25.0, 1e6])
def test_cosines_and_directions(kappa: float, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One example: the angle to its direction, and the first coordinate across it, whose laws are known."""
    count = 4096 if length < 256 else 1024
    _one_program(monkeypatch, count, length)
    direction = gradients("independent", 1, length)[0]
    direction /= np.linalg.norm(direction)
    drawn = released(np.tile(direction, count)[None], kappa, length, 80).reshape(count, length)
    assert np.abs(np.linalg.norm(drawn, axis=1) - 1).max() < 1e-6
    across = drawn - np.outer(drawn @ direction, direction)
    angles, law = angle_law(kappa, length)
    angle = np.arctan2(np.linalg.norm(across, axis=1), drawn @ direction)
    assert stats.kstest(angle, lambda at: np.interp(at, angles, law)).pvalue > ALARM / 2
    axis = np.random.default_rng(81).standard_normal(length)
    axis -= axis @ direction * direction
    shares = (1 + across @ axis / np.linalg.norm(axis) / np.linalg.norm(across, axis=1)) / 2
    if length == 2:
        assert stats.binomtest(int((shares > 0.5).sum()), count).pvalue > ALARM / 2
    else:
        assert stats.kstest(shares, stats.beta(length / 2 - 1, length / 2 - 1).cdf).pvalue > ALARM / 2


@pytest.mark.parametrize(
    ("case", "examples", "length"),
    [("independent", 3, 4), ("opposite", 4, 3), ("zeros", 4, 6)],
)
def test_agrees_with_adding_up(case: str, examples: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, kappa = 1000, 4.0
    _one_program(monkeypatch, 1024, length)
    rows = gradients(case, examples, length)
    drawn = released(np.tile(rows, count), kappa, length, 82).reshape(count, length)
    expected = draw_sums(rows, kappa, 10 * count, np.random.default_rng(83))
    assert smallest_pvalue(rows, drawn, expected) > ALARM


def test_the_comparison_can_fail() -> None:
    """It sees a concentration that is off by a fifth."""
    rows = gradients("close", 4, 5)
    expected = draw_sums(rows, 4.8, 4000, np.random.default_rng(84))
    assert smallest_pvalue(rows, released(np.tile(rows, 400), 4.0, 5, 85).reshape(400, 5), expected) < ALARM


@pytest.mark.parametrize("kappa", [0.0, 0.6, 1e7])
def test_blocks_of_one_number_are_random_signs(kappa: float) -> None:
    count = 2000
    rows = np.tile([2.0, -0.1, 0.0], count)[None]
    drawn = released(rows, kappa, 1, 86).reshape(count, 3)
    assert set(drawn.ravel()) <= {-1.0, 1.0}
    for column, share in zip(drawn.T, (1, -1, 0), strict=True):
        kept = 1 / (1 + math.exp(-2 * kappa)) if share else 0.5
        assert stats.binomtest(int((column == (share or 1)).sum()), count, kept).pvalue > ALARM / 3


def test_a_sign_tells_nothing_of_the_size() -> None:
    """Whatever a number's last bits are, what is drawn is 1 or -1 exactly."""
    rows = np.random.default_rng(92).uniform(0.5, 2, (1, 5000))
    assert set(released(rows, 0.0, 1, 93)) == {-1.0, 1.0}


@triton.jit
def _write_flips(out, words, other, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    word = tl.load(words + place).to(tl.uint32, bitcast=True)
    tl.store(out + place, (block_kernel.uniform(word, word) <= other).to(tl.int32))


def test_rare_signs_are_as_rare_as_they_should_be() -> None:
    """At kappa = 9 one of 65 million changes: of the words from 0 on, the first 65 do it."""
    words, other = np.arange(128, dtype=np.int32), math.exp(-18) / (1 + math.exp(-18))
    out = torch.zeros(128, dtype=torch.int32, device=DEVICE)
    _write_flips[(1,)](out, torch.tensor(words, device=DEVICE), other, COUNT=128)
    assert abs(int(out.sum()) - other * 2**32) <= 1


@pytest.mark.usefixtures("_small_programs")
@pytest.mark.parametrize("word", [0, 2**32 - 1, 0x20000000, 0x7FFFFFFF])
@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_extreme_bits_give_finite_draws(monkeypatch: pytest.MonkeyPatch, word: int, length: int) -> None:
    """Directions of which all words of the cipher are the same; the cosines keep theirs, or none would be accepted."""
    if DEVICE != "cpu":
        pytest.skip("a compiled program cannot be given other words")
    original = block_kernel.cipher

    def extreme(key, row, example, part, call, ROUNDS):  # type: ignore[no-untyped-def]
        words = original(key, row, example, part, call, ROUNDS)
        return tuple(value * 0 + word for value in words) if part.handle.data.max() == 0 else words

    monkeypatch.setattr(block_kernel, "cipher", extreme)
    monkeypatch.setattr(block_kernel, "cipher", extreme)
    rows = np.concatenate([np.eye(length).ravel(), np.ones(length), np.zeros(length)])[None]
    drawn = released(rows, 5.0, length, 94).reshape(-1, length)
    assert np.abs(np.linalg.norm(drawn, axis=1) - 1).max() < 1e-5


@pytest.mark.usefixtures("_small_programs")
@in_one_test(("numbers", "length"), [((40, 24), 1), ((40, 24), 2), ((40, 27), 16), ((7, 70), 17), ((100, 300), 256)])
def test_no_block_of_the_cipher_is_used_twice(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, int], length: int
) -> None:
    """Several programs, tensors, pieces of the batch and a short last block; numbers that are never used, too."""
    if DEVICE != "cpu":
        pytest.skip("a compiled program does not tell")
    used: list[tuple[int, ...]] = []
    original = block_kernel.cipher

    def noted(key, row, example, part, call, ROUNDS):  # type: ignore[no-untyped-def]
        counters = (np.atleast_1d(value.handle.data) for value in (row, example, part, call))
        used.extend(zip(*(all_.ravel().tolist() for all_ in np.broadcast_arrays(*counters)), strict=True))
        return original(key, row, example, part, call, ROUNDS)

    monkeypatch.setattr(block_kernel, "cipher", noted)
    monkeypatch.setattr(block_kernel, "cipher", noted)
    rows = gradients("independent", 3, sum(numbers))
    parts = {"a": rows[:, : numbers[0]], "b": rows[:, numbers[0] :]}
    operator = DenseGradients({name: torch.tensor(part, dtype=torch.float32) for name, part in parts.items()}, "", 1)
    VmfMechanism(25.0, f"size:{length}").release(operator, 1, stream(95))
    assert len(used) == len(set(used)) > sum(numbers) // length


@pytest.mark.usefixtures("_small_programs")
@in_one_test(
    ("numbers", "length", "chunk_bytes"),
    [(1, 2, 1 << 28), (6, 1, 1), (6, 3, 1 << 28), (7, 2, 1), (7, 3, 1 << 28), (40, 20, 1)],
)
def test_what_is_drawn_stands_in_its_place(numbers: int, length: int, chunk_bytes: int) -> None:
    """With hardly any noise, blocks are their directions: where they end with a tensor, where not, and short ones."""
    rows = gradients("independent", 3, numbers)
    drawn = released(rows, 1e7, length, 87, chunk_bytes)
    for part, some in zip(
        *(np.split(all_, range(length, numbers, length), axis=-1) for all_ in (rows, drawn)), strict=True
    ):
        assert np.linalg.norm(some - (part / np.linalg.norm(part, axis=1, keepdims=True)).sum(axis=0)) < 0.02


@pytest.mark.usefixtures("_small_programs")
@in_one_test("size", [1e-36, 1e-25, 1e20, 1e37])
@in_one_test("length", [1, 3])
def test_lengths_that_cannot_be_squared(size: float, length: int) -> None:
    rows = gradients("independent", 2, 6)
    drawn = released(rows / np.abs(rows).max() * size, 1e7, length, 88)
    for part, some in zip(*(np.split(all_, range(length, 6, length), axis=-1) for all_ in (rows, drawn)), strict=True):
        apart = np.linalg.norm(some - (part / np.linalg.norm(part, axis=1, keepdims=True)).sum(axis=0))
        assert apart < 0.02 if size > 1e-31 else np.linalg.norm(some) <= 2 + 1e-5


@pytest.mark.usefixtures("_small_programs")
def test_the_numbers_are_the_streams() -> None:
    """Streams repeat, differ from each other, and move on; examples and blocks have numbers of their own."""
    rows = np.ones((2, 8))
    first, again, other = (released(rows, 1.0, 4, seed) for seed in (89, 89, 90))
    assert np.array_equal(first, again)
    assert not np.isclose(first, other).any()
    assert not np.isclose(first[:4], first[4:]).any()
    alone, copy = released(rows[:1], 1.0, 4, 89), released(rows, 1.0, 4, 89, chunk_bytes=1)
    assert not np.isclose(first, 2 * alone).any()
    assert np.isfinite(copy).all()
    mechanism, noise = VmfMechanism(1.0, "size:4"), stream(91)
    one = DenseGradients({"a": torch.ones(1, 8, device=DEVICE)})
    assert not torch.isclose(mechanism.release(one, 1, noise)["a"], mechanism.release(one, 1, noise)["a"]).any()


@pytest.mark.parametrize(
    ("blocks", "dtype", "fused"),
    [("size:256", torch.float32, True), ("size:257", torch.float32, False), ("size:16", torch.float64, False)],
)
def test_what_is_drawn_in_one_program(
    monkeypatch: pytest.MonkeyPatch, blocks: str, dtype: torch.dtype, fused: bool
) -> None:
    calls = []
    monkeypatch.setattr(block_kernel, "draw_fused_sums", lambda gradients, *rest: calls.append(rest) or {})
    gradients = DenseGradients({"a": torch.ones(1, 600, dtype=dtype, device=DEVICE)})
    VmfMechanism(1.0, blocks).release(gradients, 1, stream())
    assert bool(calls) == fused


@pytest.mark.parametrize(
    ("compiler", "headers", "capability", "there"),
    [
        ("cc", True, (9, 0), True),
        ("cc", True, (7, 5), False),
        ("cc", False, (9, 0), False),
        ("nonsense", True, (9, 0), False),
        ("", True, (9, 0), False),
    ],
)
def test_where_programs_can_be_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
    headers: bool,
    capability: tuple[int, int],
    there: bool,
) -> None:
    monkeypatch.undo()
    (tmp_path / "cc").touch(mode=0o755)
    if headers:
        (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(block_sum_module.sysconfig, "get_path", lambda name: str(tmp_path))
    assert makes_programs.__wrapped__(torch.device("cuda")) == there
    assert not makes_programs.__wrapped__(torch.device("cpu"))


def test_no_examples() -> None:
    made = VmfMechanism(3.0, "size:2").release(DenseGradients({"a": torch.zeros(0, 5, device=DEVICE)}), 4, stream())
    assert torch.equal(made["a"].cpu(), torch.zeros(5))
