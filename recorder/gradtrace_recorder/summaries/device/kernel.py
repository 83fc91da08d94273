"""The summary of a tensor in one Triton kernel. Importing this needs Triton; `triton_rows` says when that is.

A tensor is cut into chunks of 4,096 elements, as its summary is defined. Each program takes every so-manieth chunk,
adds up what it found and leaves that in a workspace; the program that ends last adds up the workspace, in the order
of the programs, and writes the row. How many programs there are follows from the tensor's size alone, and nothing is
added by an atomic operation but the count of programs that have ended: so the bits are the same each time. Those of
fingerprint, counts and largest value are so everywhere. In which order a program adds up its own sums is Triton's
choice, and may differ between versions and kinds of devices.

Within a chunk elements are read in an order in which place k of each 16 belongs to lane k of the sketch: the sketch
is then a sum over one axis. All sums are in 64 bits, of integers and of floating-point numbers. What is not finite is
told by its bits.

`_leave_partial` ends with a barrier before the atomic operation, which releases what the whole program has stored, as
torch's own reductions over several programs do. A workspace row carries a check of its own nevertheless: where
memory shows an older one, the row says TORN, and the summary is lost instead of wrong.
"""

# Triton reads annotations as values: no `from __future__ import annotations` here.

import triton
import triton.language as tl

# Sizes and places are default values of the functions here, not names of the module: of those Triton compares each that
# a kernel uses at every launch, which took as long as all else of it. What they stand for:
# - CHUNK elements are read in TILES of ROWS x LANES;
# - a row has WORDS words; its lanes begin at FIRST_LANE, CHECK comes behind them (as `rows` has it);
# - a workspace is some lists, each as long as it has programs: the first is of fingerprints, then NANS, INFS, SQUARE,
#   LARGEST, TOTAL, P_CHECK, and from P_LANES on one for each lane;
# - FIRST, SECOND, SEED, TURN_SEED are where `triton_rows` puts these constants, behind the factors of a row's words.


@triton.jit
def _mixed(value, seed, constants, FIRST: tl.constexpr = 26, SECOND: tl.constexpr = 27):
    """splitmix64's finaliser over `value + seed`, as unsigned 64 bits."""
    first = tl.load(constants + FIRST).to(tl.uint64, bitcast=True)
    second = tl.load(constants + SECOND).to(tl.uint64, bitcast=True)
    z = (value + seed).to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * first
    z = (z ^ (z >> 27)) * second
    return z ^ (z >> 31)


@triton.jit
def _multiplier(chunk, constants, SEED: tl.constexpr = 24):
    seed = tl.load(constants + SEED)
    return _mixed(chunk, seed, constants).to(tl.int64, bitcast=True) | 1


@triton.jit
def _summed(
    values, numel, n1, n2, n3, s0, s1, s2, s3, program, programs, weights, places, constants,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, STRIDED: tl.constexpr,
    CHUNK: tl.constexpr = 4096, ROWS: tl.constexpr = 64, TILES: tl.constexpr = 4, LANES: tl.constexpr = 16,
    TURN_SEED: tl.constexpr = 25,
):  # fmt: skip
    """(fingerprint, NaNs, infinities, square, abs_max, sum, 16 lanes) of one program's chunks."""
    rows = tl.arange(0, ROWS)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    prints = tl.zeros([ROWS, LANES], tl.int64)
    nans = tl.zeros([ROWS, LANES], tl.int32)
    infs = tl.zeros([ROWS, LANES], tl.int32)
    square = tl.zeros([ROWS, LANES], tl.float64)
    largest = tl.zeros([ROWS, LANES], tl.float64)
    total = tl.zeros([ROWS, LANES], tl.float64)
    sketch = tl.zeros([ROWS, LANES], tl.float64)
    wide: tl.constexpr = values.dtype.element_ty.primitive_bitwidth == 64
    chunks = (numel + (CHUNK - 1)) // CHUNK
    chunk = program.to(tl.int64)
    while chunk < chunks:
        drawn = _mixed(chunk, tl.load(constants + TURN_SEED), constants).to(tl.int64, bitcast=True)
        drawn = tl.where(chunk == 0, 0, drawn)
        turn = (drawn & 15).to(tl.int32)
        flip = ((drawn >> 4) & 1).to(tl.int32)
        own = tl.zeros([ROWS, LANES], tl.int64)
        for tile in range(TILES):
            entry = tl.load(places + tile * (ROWS * LANES) + rows * LANES + (lanes ^ turn))
            place = entry & (CHUNK - 1)
            index = chunk * CHUNK + place
            is_there = index < numel
            if STRIDED:
                outer = index // n3
                offset = (index - outer * n3) * s3
                index = outer
                outer = index // n2
                offset += (index - outer * n2) * s2
                index = outer
                outer = index // n1
                offset += (index - outer * n1) * s1
                offset += outer * s0
            else:
                offset = index
            value = tl.load(values + offset, mask=is_there, other=0.0)
            if wide:
                bits = value.to(tl.int64, bitcast=True)
                low = bits.to(tl.int32).to(tl.int64)
                high = bits >> 32
                first = (2 * place) & (CHUNK - 1)
                word = low * tl.load(weights + first) + high * tl.load(weights + first + 1)
                # A chunk's elements are two chunks of words: tiles change over in its middle.
                prints += word * _multiplier(2 * chunk + tile // 2, constants)
            elif value.dtype.primitive_bitwidth == 32:
                bits = value.to(tl.int32, bitcast=True)
                own += bits.to(tl.int64) * tl.load(weights + place)
            else:
                bits = value.to(tl.int16, bitcast=True)
                own += bits.to(tl.int64) * tl.load(weights + place)
            is_odd = (bits & EXPONENT) == EXPONENT
            is_nan = is_odd & ((bits & MANTISSA) != 0)
            nans += is_nan.to(tl.int32)
            infs += (is_odd & ((bits & MANTISSA) == 0)).to(tl.int32)
            kept = tl.where(is_odd, 0, bits).to(value.dtype, bitcast=True)
            if not wide:
                kept = kept.to(tl.float32)
            number = kept.to(tl.float64)
            square += number * number
            largest = tl.maximum(largest, tl.abs(number))
            total += number
            is_minus = ((entry >> 12) ^ flip) == 1
            sketch += tl.where(is_minus, -number, number)
        if not wide:
            prints += own * _multiplier(chunk, constants)
        chunk += programs
    return (
        tl.sum(tl.sum(prints, 1), 0),
        tl.sum(tl.sum(nans, 1), 0).to(tl.int64),
        tl.sum(tl.sum(infs, 1), 0).to(tl.int64),
        tl.sum(tl.sum(square, 1), 0),
        tl.max(tl.max(largest, 1), 0),
        tl.sum(tl.sum(total, 1), 0),
        tl.sum(sketch, 0),
    )


@triton.jit
def _write_row(
    row, ticket, fingerprint, nans, infs, square, largest, total, torn, sketch, constants,
    LANES: tl.constexpr = 16, FIRST_LANE: tl.constexpr = 8, CHECK: tl.constexpr = 24,
):  # fmt: skip
    """The row that the host waits for, with its check."""
    squares = square.to(tl.int64, bitcast=True)
    largests = largest.to(tl.int64, bitcast=True)
    totals = total.to(tl.int64, bitcast=True)
    lanes = sketch.to(tl.int64, bitcast=True)
    places = tl.arange(0, LANES)
    check = tl.sum(lanes * tl.load(constants + FIRST_LANE + places), 0)
    check += ticket * tl.load(constants)
    check += fingerprint * tl.load(constants + 1)
    check += nans * tl.load(constants + 2)
    check += infs * tl.load(constants + 3)
    check += squares * tl.load(constants + 4)
    check += largests * tl.load(constants + 5)
    check += totals * tl.load(constants + 6)
    check += torn * tl.load(constants + 7)
    tl.store(row, ticket)
    tl.store(row + 1, fingerprint)
    tl.store(row + 2, nans)
    tl.store(row + 3, infs)
    tl.store(row + 4, squares)
    tl.store(row + 5, largests)
    tl.store(row + 6, totals)
    tl.store(row + 7, torn)
    tl.store(row + FIRST_LANE + places, lanes)
    tl.store(row + CHECK, check)


@triton.jit
def _leave_partial(
    at, length, ticket, fingerprint, nans, infs, square, largest, total, sketch,
    NANS: tl.constexpr = 1, INFS: tl.constexpr = 2, SQUARE: tl.constexpr = 3, LARGEST: tl.constexpr = 4,
    TOTAL: tl.constexpr = 5, P_CHECK: tl.constexpr = 6, P_LANES: tl.constexpr = 8, LANES: tl.constexpr = 16,
):  # fmt: skip
    """One program's share into the workspace, and a barrier behind it."""
    squares = square.to(tl.int64, bitcast=True)
    largests = largest.to(tl.int64, bitcast=True)
    totals = total.to(tl.int64, bitcast=True)
    lanes = sketch.to(tl.int64, bitcast=True)
    tl.store(at, fingerprint)
    tl.store(at + NANS * length, nans)
    tl.store(at + INFS * length, infs)
    tl.store(at + SQUARE * length, squares)
    tl.store(at + LARGEST * length, largests)
    tl.store(at + TOTAL * length, totals)
    tl.store(at + (P_LANES + tl.arange(0, LANES)) * length, lanes)
    check = ticket + fingerprint + nans + infs + squares + largests + totals + tl.sum(lanes, 0)
    tl.store(at + P_CHECK * length, check)
    tl.debug_barrier()


@triton.jit
def _finish(
    row, ticket, partials, length, programs, constants,
    NANS: tl.constexpr = 1, INFS: tl.constexpr = 2, SQUARE: tl.constexpr = 3, LARGEST: tl.constexpr = 4,
    TOTAL: tl.constexpr = 5, P_CHECK: tl.constexpr = 6, P_LANES: tl.constexpr = 8, LANES: tl.constexpr = 16,
    ROWS: tl.constexpr = 64,
):  # fmt: skip
    """Add up what all programs left, in their order. Loads go past caches that may hold older rows."""
    at = tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    prints = tl.zeros([ROWS], tl.int64)
    nans = tl.zeros([ROWS], tl.int64)
    infs = tl.zeros([ROWS], tl.int64)
    torn = tl.zeros([ROWS], tl.int64)
    square = tl.zeros([ROWS], tl.float64)
    largest = tl.zeros([ROWS], tl.float64)
    total = tl.zeros([ROWS], tl.float64)
    sketch = tl.zeros([ROWS, LANES], tl.float64)
    start = programs * 0
    while start < programs:
        place = start + at
        own = place < programs
        base = partials + place
        p = tl.load(base, mask=own, other=0, cache_modifier=".cg")
        n = tl.load(base + NANS * length, mask=own, other=0, cache_modifier=".cg")
        i = tl.load(base + INFS * length, mask=own, other=0, cache_modifier=".cg")
        s = tl.load(base + SQUARE * length, mask=own, other=0, cache_modifier=".cg")
        m = tl.load(base + LARGEST * length, mask=own, other=0, cache_modifier=".cg")
        t = tl.load(base + TOTAL * length, mask=own, other=0, cache_modifier=".cg")
        c = tl.load(base + P_CHECK * length, mask=own, other=0, cache_modifier=".cg")
        k = tl.load(
            base[:, None] + (P_LANES + lanes[None, :]) * length,
            mask=own[:, None], other=0, cache_modifier=".cg",
        )  # fmt: skip
        found = ticket + p + n + i + s + m + t + tl.sum(k, 1)
        torn += (own & (found != c)).to(tl.int64)
        prints += p
        nans += n
        infs += i
        square += s.to(tl.float64, bitcast=True)
        largest = tl.maximum(largest, m.to(tl.float64, bitcast=True))
        total += t.to(tl.float64, bitcast=True)
        sketch += k.to(tl.float64, bitcast=True)
        start += ROWS
    _write_row(
        row, ticket, tl.sum(prints, 0), tl.sum(nans, 0), tl.sum(infs, 0), tl.sum(square, 0),
        tl.max(largest, 0), tl.sum(total, 0), tl.sum(torn, 0), tl.sum(sketch, 0), constants,
    )  # fmt: skip


@triton.jit
def _share(
    values, numel, n1, n2, n3, s0, s1, s2, s3, program, programs, rows, slot, ticket, partials, length,
    counter, weights, places, constants,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, STRIDED: tl.constexpr, WORDS: tl.constexpr = 32,
):  # fmt: skip
    """What one program does for its tensor."""
    row = rows + slot * WORDS
    fingerprint, nans, infs, square, largest, total, sketch = _summed(
        values, numel, n1, n2, n3, s0, s1, s2, s3, program, programs, weights, places, constants,
        EXPONENT, MANTISSA, STRIDED,
    )  # fmt: skip
    if programs == 1:
        _write_row(
            row,
            ticket,
            fingerprint,
            nans,
            infs,
            square,
            largest,
            total,
            nans * 0,
            sketch,
            constants,
        )
    else:
        _leave_partial(
            partials + program, length, ticket, fingerprint, nans, infs, square, largest, total,
            sketch,
        )  # fmt: skip
        ended = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if ended == programs - 1:
            tl.store(counter, 0)
            _finish(row, ticket, partials, length, programs, constants)


_NEVER_SPECIALIZED = [
    "values", "numel", "n1", "n2", "n3", "s0", "s1", "s2", "s3", "rows", "slot", "ticket", "partials", "length",
    "counters", "weights", "places", "constants", "table", "owners", "count",
]  # fmt: skip


@triton.jit(do_not_specialize=_NEVER_SPECIALIZED, do_not_specialize_on_alignment=_NEVER_SPECIALIZED)
def summarise_one(
    values,
    numel: tl.int64, n1: tl.int64, n2: tl.int64, n3: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64,
    rows, slot: tl.int64, ticket: tl.int64, partials, length: tl.int64, counters,
    weights, places, constants,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """One tensor, in logical order over up to four sizes (of which the first is not asked) and their strides."""
    program = tl.program_id(0)
    _share(
        values, numel, n1, n2, n3, s0, s1, s2, s3, program, tl.num_programs(0), rows, slot,
        ticket, partials, length, counters, weights, places, constants, EXPONENT, MANTISSA, STRIDED,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NEVER_SPECIALIZED, do_not_specialize_on_alignment=_NEVER_SPECIALIZED)
def summarise_many(
    table, owners, rows, partials, length: tl.int64, counters, weights, places, constants,
    DTYPE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Many contiguous tensors of one dtype. `owners` says which tensor a program works for; a tensor's entry in
    `table` is its address, numel, slot, ticket, first program and count of programs."""
    owner = tl.load(owners + tl.program_id(0)).to(tl.int64)
    entry = table + owner * 8
    values = tl.load(entry).to(tl.pointer_type(DTYPE))
    numel = tl.load(entry + 1)
    slot = tl.load(entry + 2)
    ticket = tl.load(entry + 3)
    first = tl.load(entry + 4)
    programs = tl.load(entry + 5)
    program = tl.program_id(0) - first
    zero = numel * 0
    _share(
        values, numel, zero, zero, zero, zero, zero, zero, zero, program, programs,
        rows, slot, ticket, partials + first, length, counters + owner, weights, places, constants,
        EXPONENT, MANTISSA, False,
    )  # fmt: skip
