"""The arithmetic of ``curvature="adaptive"`` between its products, for many layers in each launch: Triton kernels.

Input: tables with the addresses of the layers' tensors. Output: moments, updates and values per layer, in place. Owns:
nothing. ``adaptive_passes.py`` and ``precondition/adaptive.py`` have the same in plain torch.

Layers are cut in chunks of ``CHUNK`` elements, each processed by one program. Programs write partial sums, which the
next kernel adds up in a fixed order. If ``good`` is False, gradients count as zeros.
"""

from __future__ import annotations

from typing import Any

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

PER_PROGRAM = {"CHUNK": 4096, "BLOCK": 1024}
"""Elements that a program processes, and how many of them at once."""
NUM_VALUES = 8
"""Of a layer while it is stepped: sum and mean of its second moments, what is added to them before the square root, and
bounds on elements of its update and of Adam's; the rest is not used."""

# Fields of a layer, 16 of 64 bits: 0-2 addresses of gradient, momentum (or its offset in working memory) and second
# moment; 3 size; 4, 5 its first chunk and their number; 6-9 addresses of the moments' weights and of the logarithms of
# damping and length; 10 elements without padding; 11, 12 its first tile of Adam's length and their number.


def total_kernel(  # type: ignore[no-untyped-def]
    layers, chunks, partial, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    # Sum of the second moments.
    meta = layers + tl.load(chunks + 2 * tl.program_id(0)) * 16
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(meta + 3)
    square = tl.load(meta + 2).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        square = tl.multiple_of(square, 16)
        size = tl.multiple_of(size, 4)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(CHUNK // BLOCK):
        place = begin + i * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(square + place, mask=place < size, other=0.0)
    tl.store(partial + tl.program_id(0), tl.sum(total))


def open_kernel(layers, partial, values, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # Sum and mean of the second moments, and what the last damping adds to them.
    meta = layers + tl.program_id(0) * 16
    first = tl.load(meta + 4)
    count = tl.load(meta + 5)
    sums = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        sums += tl.load(partial + first + place, mask=place < count, other=0.0)
    total = tl.sum(sums)
    level = total / tl.load(meta + 10).to(tl.float32)
    damping = tl.load(tl.load(meta + 8).to(tl.pointer_type(tl.float32)))
    values += tl.program_id(0) * 8
    tl.store(values, total)
    tl.store(values + 1, level)
    tl.store(values + 2, tl.maximum(tl.exp(2 * damping) * level, 1.1754943508222875e-38))


def judge_kernel(  # type: ignore[no-untyped-def]
    layers, chunks, values, work, good, partial,
    WORKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    layer = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    meta = layers + layer * 16
    size = tl.load(meta + 3)
    gradient = tl.load(meta).to(tl.pointer_type(tl.float32))
    momentum = (tl.load(meta + 1) + WORKS * work.to(tl.int64)).to(tl.pointer_type(tl.float32))
    square = tl.load(meta + 2).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        gradient = tl.multiple_of(gradient, 16)
        momentum = tl.multiple_of(momentum, 16)
        square = tl.multiple_of(square, 16)
        size = tl.multiple_of(size, 4)
    level = tl.load(values + layer * 8 + 1)
    shift = tl.load(values + layer * 8 + 2)
    is_good = tl.load(good)
    uu = tl.zeros((BLOCK,), tl.float32)
    yuu = tl.zeros((BLOCK,), tl.float32)
    vuu = tl.zeros((BLOCK,), tl.float32)
    vyuu = tl.zeros((BLOCK,), tl.float32)
    vyyuu = tl.zeros((BLOCK,), tl.float32)
    gu = tl.zeros((BLOCK,), tl.float32)
    gyu = tl.zeros((BLOCK,), tl.float32)
    gg = tl.zeros((BLOCK,), tl.float32)
    for i in range(CHUNK // BLOCK):
        place = begin + i * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(gradient + place, mask=place < size, other=0.0)
        g = tl.where(is_good, g, 0.0)
        m = tl.load(momentum + place, mask=place < size, other=0.0)
        v = tl.load(square + place, mask=place < size, other=0.0)
        root = tl.rsqrt(v + shift)
        u = m * root
        y = (v - level) * root * root
        yu = y * u
        vu = v * u
        uu += u * u
        yuu += yu * u
        vuu += vu * u
        vyuu += vu * yu
        vyyuu += vu * y * yu
        gu += g * u
        gyu += g * yu
        gg += g * g
    partial += tl.program_id(0) * 8
    tl.store(partial, tl.sum(uu))
    tl.store(partial + 1, tl.sum(yuu))
    tl.store(partial + 2, tl.sum(vuu))
    tl.store(partial + 3, tl.sum(vyuu))
    tl.store(partial + 4, tl.sum(vyyuu))
    tl.store(partial + 5, tl.sum(gu))
    tl.store(partial + 6, tl.sum(gyu))
    tl.store(partial + 7, tl.sum(gg))


def follow_kernel(  # type: ignore[no-untyped-def]
    layers, partial, values, good, keep, keep_square, less, less_square, ratio, surprise,
    RATE: tl.constexpr, MARGIN: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, SHORTEST: tl.constexpr,
    RECOVER: tl.constexpr, OPPOSED: tl.constexpr, BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Judge the last update, adjust damping and length, and say how the next update is computed.
    tiny = 1.1754943508222875e-38
    meta = layers + tl.program_id(0) * 16
    first = tl.load(meta + 4)
    count = tl.load(meta + 5)
    uu = tl.zeros((BLOCK,), tl.float32)
    yuu = tl.zeros((BLOCK,), tl.float32)
    vuu = tl.zeros((BLOCK,), tl.float32)
    vyuu = tl.zeros((BLOCK,), tl.float32)
    vyyuu = tl.zeros((BLOCK,), tl.float32)
    gu = tl.zeros((BLOCK,), tl.float32)
    gyu = tl.zeros((BLOCK,), tl.float32)
    gg = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < count
        here = partial + (first + place) * 8
        uu += tl.load(here, mask=inside, other=0.0)
        yuu += tl.load(here + 1, mask=inside, other=0.0)
        vuu += tl.load(here + 2, mask=inside, other=0.0)
        vyuu += tl.load(here + 3, mask=inside, other=0.0)
        vyyuu += tl.load(here + 4, mask=inside, other=0.0)
        gu += tl.load(here + 5, mask=inside, other=0.0)
        gyu += tl.load(here + 6, mask=inside, other=0.0)
        gg += tl.load(here + 7, mask=inside, other=0.0)
    u_u = tl.sum(uu)
    v_uu = tl.sum(vuu)
    vy_uu = tl.sum(vyuu)
    vyy_uu = tl.sum(vyyuu)
    g_u = tl.sum(gu)
    g_g = tl.sum(gg)
    c = tl.sum(yuu) / tl.maximum(u_u, tiny)
    of_mean = tl.load(meta + 6).to(tl.pointer_type(tl.float32))
    of_square = tl.load(meta + 7).to(tl.pointer_type(tl.float32))
    of_damping = tl.load(meta + 8).to(tl.pointer_type(tl.float32))
    of_length = tl.load(meta + 9).to(tl.pointer_type(tl.float32))
    mean_weight = tl.load(of_mean)
    square_weight = tl.load(of_square)
    log_damping = tl.load(of_damping)
    log_length = tl.load(of_length)
    values += tl.program_id(0) * 8
    total = tl.load(values)
    is_good = tl.load(good)
    is_known = is_good & (mean_weight > 0)

    noise = vyy_uu - 2 * c * vy_uu + c * c * v_uu
    noise = tl.maximum(noise, 7.62939453125e-06 * (vyy_uu + c * c * v_uu))
    root = tl.sqrt_rn(square_weight)
    to_damping = root * (tl.sum(gyu) - c * g_u) * tl.rsqrt(tl.maximum(noise, tiny))
    to_length = root * g_u * tl.rsqrt(tl.maximum(v_uu, tiny))
    to_damping = tl.where(tl.abs(to_damping) < float("inf"), to_damping, 0.0)
    to_length = tl.where(tl.abs(to_length) < float("inf"), to_length, 0.0)
    energy = g_g * square_weight / tl.maximum(total, tiny)

    followed = log_damping + RATE * (tl.minimum(tl.maximum(to_damping, -3.0), 3.0) - MARGIN)
    log_damping = tl.minimum(tl.maximum(tl.where(is_known, followed, log_damping), LEAST), MOST)
    was_too_long = (to_length < OPPOSED) & (energy > surprise)
    cut = log_length - RATE * tl.log(tl.minimum(tl.maximum(energy, 1.0), 1e4))
    followed = tl.where(was_too_long, cut, log_length + RECOVER)
    log_length = tl.minimum(tl.maximum(tl.where(is_known, followed, log_length), SHORTEST), 0.0)

    mean_weight = tl.where(is_good, mean_weight * keep + 1, mean_weight)
    square_weight = tl.where(is_good, square_weight * keep_square + 1, square_weight)
    tl.store(of_mean, mean_weight)
    tl.store(of_square, square_weight)
    tl.store(of_damping, log_damping)
    tl.store(of_length, log_length)

    if BOUNDED:
        gone = tl.minimum(tl.maximum(1 - mean_weight * less, 0.0), 1.0)
        gone_square = tl.minimum(tl.maximum(1 - square_weight * less_square, 1e-6), 1.0)
        share = tl.maximum(1 - gone * gone / gone_square, 1e-3) / (1 - ratio)
        most = 1.01 * tl.sqrt_rn(share * square_weight) / tl.maximum(mean_weight, tiny)
    else:
        most = mean_weight * 0 + float("inf")
    level = (tl.where(is_good, total * keep_square, total) + g_g) / tl.load(meta + 10).to(tl.float32)
    tl.store(values + 1, level)
    tl.store(values + 2, tl.maximum(tl.exp(2 * log_damping) * level, tiny))
    tl.store(values + 3, most * mean_weight * tl.rsqrt(tl.maximum(square_weight, tiny)))
    tl.store(values + 4, most)


def update_kernel(  # type: ignore[no-untyped-def]
    layers, chunks, values, work, good, partial, keep, keep_square,
    NESTEROV: tl.constexpr, WORKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # Update the moments, and replace the gradient by the update, before it is scaled.
    layer = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    meta = layers + layer * 16
    size = tl.load(meta + 3)
    gradient = tl.load(meta).to(tl.pointer_type(tl.float32))
    momentum = (tl.load(meta + 1) + WORKS * work.to(tl.int64)).to(tl.pointer_type(tl.float32))
    square = tl.load(meta + 2).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        gradient = tl.multiple_of(gradient, 16)
        momentum = tl.multiple_of(momentum, 16)
        square = tl.multiple_of(square, 16)
        size = tl.multiple_of(size, 4)
    shift = tl.load(values + layer * 8 + 2)
    most = tl.load(values + layer * 8 + 3)
    is_good = tl.load(good)
    decay = tl.where(is_good, keep, 1.0)
    decay_square = tl.where(is_good, keep_square, 1.0)
    uu = tl.zeros((BLOCK,), tl.float32)
    mm = tl.zeros((BLOCK,), tl.float32)
    for i in range(CHUNK // BLOCK):
        place = begin + i * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        g = tl.load(gradient + place, mask=inside, other=0.0)
        g = tl.where(is_good, g, 0.0)
        m = tl.load(momentum + place, mask=inside, other=0.0) * decay + g
        v = tl.load(square + place, mask=inside, other=0.0) * decay_square + g * g
        if not WORKS:
            tl.store(momentum + place, m, mask=inside)
        tl.store(square + place, v, mask=inside)
        if NESTEROV:
            m = g + m * decay
        u = tl.rsqrt(v + shift) * m
        u = tl.where(u > most, most, tl.where(u < -most, -most, u))  # keeps NaN
        tl.store(gradient + place, u, mask=inside)
        uu += tl.where(inside, u * u, 0.0)
        mm += m * m
    tl.store(partial + tl.program_id(0) * 2, tl.sum(uu))
    tl.store(partial + tl.program_id(0) * 2 + 1, tl.sum(mm))


def close_kernel(  # type: ignore[no-untyped-def]
    layers, partial, lengths, order, before, scales, sane, after, ADAM: tl.constexpr, BLOCK: tl.constexpr
):
    # The factor that gives an update the length of the optimizer's own, and whether the update is finite.
    meta = layers + tl.program_id(0) * 16
    first = tl.load(meta + 4)
    count = tl.load(meta + 5)
    uu = tl.zeros((BLOCK,), tl.float32)
    mm = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < count
        uu += tl.load(partial + (first + place) * 2, mask=inside, other=0.0)
        mm += tl.load(partial + (first + place) * 2 + 1, mask=inside, other=0.0)
    if ADAM:
        first = tl.load(meta + 11)
        count = tl.load(meta + 12)
        mm = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, count, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            mm += tl.load(lengths + first + place, mask=place < count, other=0.0)
    norm = tl.sqrt_rn(tl.sum(uu))
    length = tl.exp(tl.load(tl.load(meta + 9).to(tl.pointer_type(tl.float32))))
    scale = length * tl.sqrt_rn(tl.sum(mm)) / tl.maximum(norm, 1.1754943508222875e-38)
    found = scale * norm
    is_sane = tl.abs(found) < float("inf")
    index = tl.load(order + tl.program_id(0))
    tl.store(scales + index, scale)
    tl.store(sane + index, is_sane)
    tl.store(after + index, tl.where(is_sane, found, tl.load(before + index)))
