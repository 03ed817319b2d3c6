"""The rejection trials of ``tuples`` as machine code, where numba is installed; the same law as the plain code.

A trial draws two tuples and a standard exponential E, and accepts where factor · ‖u − v‖² <= E for the tuples' means u
and v. It reads coordinates only until the distance so far rejects. Numbers come from xoshiro256** (Blackman and Vigna
2021), whole ones without bias (Lemire 2019); one stream for each chunk of trials, seeded by splitmix64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["trial_kernel"]

_BATCH = 256  # trials whose memory accesses overlap
_PIECE = 64  # coordinates between two looks at the distance so far


@lru_cache(maxsize=1)
def trial_kernel() -> Callable[..., int] | None:
    """The compiled loop, or None without numba. Compiling takes two seconds, at the first call of what is returned.

    Its arguments: ``near`` and ``far``, float32 (K, ·), the first coordinates and the next ones, of the records for
    r = 2 and of the tuples' means for r > 2; ``records``, float32 (n, d); ``members``, int32 (N, r); ``factor``, with
    every allowance in it; ``count`` of trials, N < 2^32; ``seed``; and ``found``, int64 (count, 2), to be filled with
    the numbers of the merged tuples. It returns how many were.
    """
    try:
        import numba
    except ImportError:
        return None

    u64, f32, f64 = np.uint64, np.float32, np.float64
    # sums of squares may be added up in any order; nothing else is relaxed
    jit = numba.njit(nogil=True, fastmath={"reassoc", "contract"})

    @jit
    def kernel(near, far, records, members, factor, count, seed, found):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        total, size = members.shape
        width, first, second = records.shape[1], near.shape[1], far.shape[1]
        state = np.empty(4, dtype=u64)
        word = u64(seed)
        for index in range(4):
            word += u64(0x9E3779B97F4A7C15)
            mixed = (word ^ (word >> u64(30))) * u64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> u64(27))) * u64(0x94D049BB133111EB)
            state[index] = mixed ^ (mixed >> u64(31))
        s0, s1, s2, s3 = state[0], state[1], state[2], state[3]
        low, high = u64(0xFFFFFFFF), u64(32)
        number = u64(total)
        unfair = (u64(1 << 32) - number) % number
        a = np.empty(_BATCH, dtype=np.int64)
        b = np.empty(_BATCH, dtype=np.int64)
        limit = np.empty(_BATCH, dtype=f64)
        four = np.empty((_BATCH, 4), dtype=np.int32)
        distance = np.empty(_BATCH, dtype=f32)
        gaps = np.empty(_PIECE, dtype=f64)
        # for r = 2 the sums of both members are compared, not the means
        scale = f64(4.0 if size == 2 else 1.0)
        accepted, done = 0, 0
        while done < count:
            batch = min(_BATCH, count - done)
            done += batch
            for t in range(batch):
                while True:
                    word = s1 * u64(5)
                    word = ((word << u64(7)) | (word >> u64(57))) * u64(9)
                    mixed = s1 << u64(17)
                    s2 ^= s0
                    s3 ^= s1
                    s1 ^= s2
                    s0 ^= s3
                    s2 ^= mixed
                    s3 = (s3 << u64(45)) | (s3 >> u64(19))
                    first_product, second_product = (word >> high) * number, (word & low) * number
                    if (first_product & low) >= unfair and (second_product & low) >= unfair:
                        break
                a[t], b[t] = np.int64(first_product >> high), np.int64(second_product >> high)
                word = s1 * u64(5)
                word = ((word << u64(7)) | (word >> u64(57))) * u64(9)
                mixed = s1 << u64(17)
                s2 ^= s0
                s3 ^= s1
                s1 ^= s2
                s0 ^= s3
                s2 ^= mixed
                s3 = (s3 << u64(45)) | (s3 >> u64(19))
                limit[t] = f64((word >> u64(11)) + u64(1)) * (1.0 / 9007199254740992.0)  # uniform in (0, 1]
            for t in range(batch):
                limit[t] = -np.log(limit[t]) * (scale / factor)
            if size == 2:
                for t in range(batch):
                    four[t, 0], four[t, 1] = members[a[t], 0], members[a[t], 1]
                    four[t, 2], four[t, 3] = members[b[t], 0], members[b[t], 1]
                for t in range(batch):
                    partial = f32(0.0)
                    for j in range(first):
                        gap = (near[four[t, 0], j] + near[four[t, 1], j]) - (near[four[t, 2], j] + near[four[t, 3], j])
                        partial += gap * gap
                    distance[t] = partial
            else:
                for t in range(batch):
                    partial = f32(0.0)
                    for j in range(first):
                        gap = near[a[t], j] - near[b[t], j]
                        partial += gap * gap
                    distance[t] = partial
            for t in range(batch):
                if distance[t] > limit[t]:
                    continue
                partial = distance[t]
                if size == 2:
                    for j in range(second):
                        gap = (far[four[t, 0], j] + far[four[t, 1], j]) - (far[four[t, 2], j] + far[four[t, 3], j])
                        partial += gap * gap
                else:
                    for j in range(second):
                        gap = far[a[t], j] - far[b[t], j]
                        partial += gap * gap
                if partial > limit[t]:
                    continue
                bound = limit[t] * (size * size) / scale
                exact = f64(0.0)
                for start in range(0, width, _PIECE):
                    piece = min(_PIECE, width - start)
                    for j in range(piece):
                        gaps[j] = 0.0
                    for k in range(size):
                        x, y = records[members[a[t], k]], records[members[b[t], k]]
                        for j in range(piece):
                            gaps[j] += f64(x[start + j]) - f64(y[start + j])
                    for j in range(piece):
                        exact += gaps[j] * gaps[j]
                    if exact > bound:
                        break
                if exact <= bound:
                    found[accepted, 0], found[accepted, 1] = a[t], b[t]
                    accepted += 1
        return accepted

    compiled: Callable[..., Any] = kernel
    return compiled
