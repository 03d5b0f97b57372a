"""Random numbers inside programs of Triton (Tillet, Kung and Cox 2019), made where they are used.

Their bits come from ChaCha (Bernstein 2008) with twelve rounds, a stream cipher as AES in counter mode is one: no
attack is known that is faster than to guess its key. On a graphics card it needs nothing but additions, exclusive-ors
and turns of words. A block of the cipher is counted by four numbers; who calls sees to it that no block is used twice.
"""

import math

import triton
import triton.language as tl

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
    """Standard normal numbers (rows, WIDTH), of the first WIDTH / 16 parts of each row (Box and Muller 1958).

    Args:
        row: numbers of rows, (rows,).
        example: a number for each row, (rows,).
    """
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
    """Uniform numbers between 0 and 1, from a word and the lowest 8 bits of another: they go down to 2^-41.

    None rounds to 1, whose logarithm would be 0.
    """
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
