"""Sums of von Mises-Fisher draws on blocks, on a GPU in one pass over the gradients (Triton).

The law is that of the module ``block_sum``, the numbers are others: there the processor makes each normal number of the
cipher's bits, and numpy each cosine; here all are made where they are used (see below).

A draw is t mu + sqrt(1 - t^2) v. The direction v is that of a normal vector, less its part along mu; in the plane it is
one of two. The cosine t comes from Wood's rejection (see ``vmf_sampling``), whose proposals are first coordinates
of uniform directions: sqrt(1 - u^(2 / (D - 2))) cos(angle) with u uniform, and the angle (Ulrich 1984, Computer
generation of distributions on the m-sphere).
"""

import math
from collections.abc import Iterator
from itertools import count

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedpriv.gradients import Block, GradientOperator, Vector, flattened
from fedpriv.mechanisms.machinery.base import block_runs
from fedpriv.mechanisms.machinery.vmf_sampling import Draws, wood_parameter

# Random numbers inside programs of Triton (Tillet, Kung and Cox 2019): ChaCha with twelve rounds (Bernstein 2008), a
# stream cipher. A block is counted by four numbers; the caller uses none twice.


# Of 32 bits, in a block of the cipher.
WORDS = tl.constexpr(16)

# ChaCha20, ChaCha12 and ChaCha8 differ in this alone.
ROUNDS = tl.constexpr(12)

# Steps of uniform numbers, of their last bits, and of angles in an eighth of a circle.
STEP = tl.constexpr(2.0**-32)
FINE = tl.constexpr(2.0**-40)
ANGLE = tl.constexpr(math.pi / 4 * 2.0**-21)

# The largest number below 1.
LARGEST = tl.constexpr(1 - 2.0**-24)


@triton.jit
def normal(key, row, example, call, WIDTH: tl.constexpr):
    """Standard normal numbers (rows, WIDTH), for numbers of rows and of examples (rows,) (Box and Muller 1958)."""
    parts: tl.constexpr = WIDTH // WORDS
    part = tl.arange(0, parts)[None, :] + tl.zeros_like(row)[:, None]
    w = cipher(key, row[:, None] + tl.zeros_like(part), example[:, None], part, call, ROUNDS)
    far = _eight(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7])
    turn = _eight(w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15])
    distance = tl.sqrt(-2 * tl.log(uniform(far, turn)))
    across, up = on_circle(turn)
    return tl.join(distance * across, distance * up).reshape(row.shape[0], WIDTH)


@triton.jit
def _eight(a, b, c, d, e, f, g, h):
    """Put numbers (rows, n) beside each other, (rows, n, 8), in whatever order."""
    together = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    return together.reshape(a.shape[0], a.shape[1], 8)


@triton.jit
def uniform(word, more):
    """Uniform numbers above 0 and below 1 from a word and 8 bits of another, down to 2^-41."""
    return tl.minimum(word.to(tl.float32) * STEP + ((more & 0xFF).to(tl.float32) + 0.5) * FINE, LARGEST)


@triton.jit
def on_circle(word):
    """Points of the unit circle, from the upper 24 bits of a word: three choose an eighth of it, 21 the place there."""
    angle = (((word >> 8) & 0x1FFFFF).to(tl.float32) + 0.5) * ANGLE
    square = angle * angle
    # Taylor's polynomials; up to an eighth of a turn what they leave out is below single precision.
    up = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880)))))
    across = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320))))
    turned = (word & 0x20000000) != 0
    first, second = tl.where(turned, up, across), tl.where(turned, across, up)
    return tl.where((word & 0x40000000) != 0, -first, first), tl.where((word & 0x80000000) != 0, -second, second)


@triton.jit
def cipher(key, row, example, part, call, ROUNDS: tl.constexpr):
    """The 16 words of a block of the cipher for each row (RFC 8439, section 2.3, but for the number of rounds)."""
    zeros = tl.zeros_like(row).to(tl.uint32)
    a0, a1, a2, a3 = zeros + 0x61707865, zeros + 0x3320646E, zeros + 0x79622D32, zeros + 0x6B206574
    b0, b1, b2, b3 = _word(key, 0), _word(key, 1), _word(key, 2), _word(key, 3)
    c0, c1, c2, c3 = _word(key, 4), _word(key, 5), _word(key, 6), _word(key, 7)
    d0, d1, d2, d3 = row.to(tl.uint32), example.to(tl.uint32), part.to(tl.uint32), call.to(tl.uint32)
    x0, x1, x2, x3 = a0, a1, a2, a3
    x4, x5, x6, x7 = zeros + b0, zeros + b1, zeros + b2, zeros + b3
    x8, x9, x10, x11 = zeros + c0, zeros + c1, zeros + c2, zeros + c3
    x12, x13, x14, x15 = zeros + d0, zeros + d1, zeros + d2, zeros + d3
    for _ in tl.static_range(ROUNDS // 2):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    first = (x0 + a0, x1 + a1, x2 + a2, x3 + a3, x4 + b0, x5 + b1, x6 + b2, x7 + b3)
    return first + (x8 + c0, x9 + c1, x10 + c2, x11 + c3, x12 + d0, x13 + d1, x14 + d2, x15 + d3)  # noqa: RUF005


@triton.jit
def _word(key, number: tl.constexpr):
    return tl.load(key + number).to(tl.uint32, bitcast=True)


@triton.jit
def _quarter(a, b, c, d):
    """A quarter of a round."""
    a += b
    d = _turned(d ^ a, 16)
    c += d
    b = _turned(b ^ c, 12)
    a += b
    d = _turned(d ^ a, 8)
    c += d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _turned(word, bits: tl.constexpr):
    return (word << bits) | (word >> (32 - bits))


# Numbers that one program works on: sixteen, or one block of the cipher, for each thread of a warp.
NUMBERS = 512

# Proposals for a cosine that are made of one block of the cipher, three words for each.
PROPOSALS = tl.constexpr(5)

# A block whose length is not above this has no direction, as in the module ``block_sum``.
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps)


def draw_fused_sums(gradients: GradientOperator, length: int, draws: Draws) -> Vector:
    """Draw what :func:`~fedpriv.mechanisms.machinery.block_sum.draw_block_sums` draws."""
    total = torch.zeros(gradients.dimension(), dtype=gradients.dtype, device=gradients.device)
    key = torch.frombuffer(bytearray(draws.noise.key() + draws.noise.key()), dtype=torch.int32).to(total.device)
    calls = count()
    start = 0
    with torch.cuda.device_of(total):  # where Triton starts its programs
        for names in _spans(gradients, length):
            numbers = gradients.dimension(names)
            _add_span(total[start : start + numbers], gradients, names, draws.kappa, length, key, calls)
            start += numbers
    return gradients.vector(total.mul_(draws.scale))


def _spans(gradients: GradientOperator, length: int) -> Iterator[Block]:
    """Cut the parameters wherever a tensor ends with a block: what lies between need not be copied to be in order."""
    names: list[str] = []
    numbers = 0
    for name, shape in gradients.shapes.items():
        names.append(name)
        numbers += shape.numel()
        if numbers and numbers % length == 0:
            yield tuple(names)
            names, numbers = [], 0
    if names:
        yield tuple(names)


def _add_span(
    total: Tensor,
    gradients: GradientOperator,
    names: Block,
    kappa: float,
    length: int,
    key: Tensor,
    calls: Iterator[int],
) -> None:
    """Add the draws of some parameters to ``total`` (K,), in place; of each call of the cipher there is a number."""
    runs = block_runs(f"size:{length}", [len(total)])
    ends = [count * size for count, size in runs]
    copies = 1 if len(names) == 1 else 2
    together = max(1, gradients.chunk_bytes // (copies * max(1, total.nbytes)))
    for start in range(0, gradients.examples, together):
        rows = gradients.rows(start, min(start + together, gradients.examples), names)
        written = [flattened(value) for value in rows.values()]
        flat = written[0].contiguous() if copies == 1 else torch.cat(written, dim=1)
        for (_, size), sums, blocks in zip(runs, total.split(ends), flat.split(ends, dim=1), strict=True):
            _launch(sums.view(-1, size), blocks.unflatten(1, (-1, size)), kappa, key, next(calls))


def _launch(total: Tensor, rows: Tensor, kappa: float, key: Tensor, call: int) -> None:
    """Add to ``total`` (m, d) the sum over n examples of draws around the blocks in ``rows`` (n, m, d), in place."""
    examples, blocks, length = rows.shape
    b = wood_parameter(kappa, length) if length > 1 else 1.0
    width = max(WORDS.value, triton.next_power_of_2(length))
    at_once = max(1, NUMBERS // width)
    _add_draws[(triton.cdiv(blocks, at_once),)](
        total,
        rows,
        key,
        call,
        examples,
        rows.stride(0),
        blocks,
        math.exp(-2 * kappa) / (1 + math.exp(-2 * kappa)),  # of the other sign, in one dimension
        # Wood's x0, what it lacks to 1, the slope of the acceptance in its first term, and the sine's factor.
        (1 - b) / (1 + b),
        2 * b / (1 + b),
        4 * kappa * b / (1 + b) ** 2,
        2 * math.sqrt(b) / (1 + b),
        LENGTH=length,
        WIDTH=width,
        BLOCKS=at_once,
        num_warps=1,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["call", "examples", "blocks", "other", "x0", "gap", "slope", "chord"])
def _add_draws(
    total,
    rows,
    key,
    call,
    examples,
    stride,
    blocks,
    other,
    x0,
    gap,
    slope,
    chord,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.arange(0, WIDTH)
    places = row[:, None].to(tl.int64) * LENGTH + column[None, :]
    inside = (row < blocks)[:, None] & (column < LENGTH)[None, :]
    sums = tl.load(total + places, mask=inside, other=0.0)
    example = tl.zeros_like(row)
    for _ in range(examples):
        block = tl.load(rows + places, mask=inside, other=0.0)
        largest = tl.max(tl.abs(block), axis=1)
        # Scaled by its largest number, a block has squares that are neither 0 nor infinite.
        block = tl.where((largest > SMALLEST / LENGTH)[:, None], block / largest[:, None], 0.0)
        squared = tl.sum(block * block, axis=1)
        directed = largest * tl.sqrt(squared) > SMALLEST
        squared = tl.where(directed, squared, 1.0)
        if LENGTH == 1:
            words = cipher(key, row, example, tl.zeros_like(row), call, ROUNDS)
            flipped = uniform(words[0], words[1]) <= tl.where(directed, other, 0.5)
            sums += tl.where((block < 0) != flipped[:, None], -1.0, 1.0)
        elif LENGTH == 2:
            cosine, sine = _angles(key, row, example, call, x0, gap, slope, chord, LENGTH, WIDTH // WORDS)
            words = cipher(key, row, example, tl.zeros_like(row), call, ROUNDS)
            first, second = on_circle(words[0])
            shrunk = tl.rsqrt(squared)
            first = tl.where(directed, _column(block, column, 0) * shrunk, first)
            second = tl.where(directed, _column(block, column, 1) * shrunk, second)
            sine = tl.where((words[1] & 1) != 0, sine, -sine)
            sums += (cosine * first - sine * second)[:, None] * (column == 0)[None, :]
            sums += (cosine * second + sine * first)[:, None] * (column == 1)[None, :]
        else:
            cosine, sine = _angles(key, row, example, call, x0, gap, slope, chord, LENGTH, WIDTH // WORDS)
            cosine, sine = tl.where(directed, cosine, 0.0), tl.where(directed, sine, 1.0)
            numbers = tl.where((column < LENGTH)[None, :], normal(key, row, example, call, WIDTH), 0.0)
            across = _less_along(numbers, block, directed, squared)
            if LENGTH < 8:  # little may be left of a short vector, so that rounding shows: once more
                across = _less_along(across, block, directed, squared)
            sums += (cosine * tl.rsqrt(squared))[:, None] * block
            sums += (sine * tl.rsqrt(tl.sum(across * across, axis=1)))[:, None] * across
        rows += stride
        example += 1
    tl.store(total + places, sums, mask=inside)


@triton.jit
def _column(block, column, number: tl.constexpr):
    return tl.sum(tl.where((column == number)[None, :], block, 0.0), axis=1)


@triton.jit
def _less_along(numbers, block, directed, squared):
    """Take off the vectors in ``numbers`` their parts along the blocks, where those have a direction."""
    along = tl.where(directed, tl.sum(numbers * block, axis=1) / squared, 0.0)
    return numbers - along[:, None] * block


@triton.jit
def _angles(key, row, example, call, x0, gap, slope, chord, LENGTH: tl.constexpr, FIRST: tl.constexpr):
    """Cosines and sines of draws, one a row; the cipher's blocks ``FIRST`` and on are theirs."""
    cosine, sine = tl.zeros_like(row).to(tl.float32), tl.zeros_like(row).to(tl.float32)
    open_ = tl.full(row.shape, 1, tl.int32)
    part = tl.zeros_like(row) + FIRST
    while tl.max(open_) > 0:
        words = cipher(key, row, example, part, call, ROUNDS)
        for number in tl.static_range(PROPOSALS):
            if tl.max(open_) > 0:
                turn = words[3 * number + 1]
                across, up = on_circle(turn)
                if LENGTH > 2:
                    q = tl.exp(tl.log(uniform(words[3 * number], turn)) * (2 / (LENGTH - 2)))
                else:
                    q = tl.zeros_like(across)
                y = tl.sqrt(1 - q) * across
                half = q + (1 - q) * up * up  # 1 - y^2
                stretch = gap + x0 * tl.where(y < 0, half / (1 - y), 1 + y)  # 1 + x0 y
                height = slope * y / stretch - (LENGTH - 1) * tl.log(stretch)
                # Of the last word each proposal has six bits of its own.
                chance = uniform(words[3 * number + 2], (words[15] >> (6 * number)) << 2)
                kept = (open_ > 0) & (height >= tl.log(chance))
                cosine = tl.where(kept, (x0 + y) / stretch, cosine)
                sine = tl.where(kept, chord * tl.sqrt(half) / stretch, sine)
                open_ = tl.where(kept, 0, open_)
        part += 1
    return cosine, sine
