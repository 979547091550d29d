"""Where the blocks of a cluster cut K of a tile of `gemm_many`: each sends the others their columns of its partial sums
through distributed shared memory and adds what it gets to its own, in a fixed order. No kernel lives here."""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.many_tile import CONSUMERS, WG, ManyTile
from tvm.script import tirx as T

ARRIVE, WAIT = "barrier.cluster.arrive.release", "barrier.cluster.wait.acquire"


@T.inline
def meet():
    """All threads of all blocks of a cluster; what they wrote to each other is then there."""
    T.ptx[ARRIVE]()
    T.ptx[WAIT]()


def exchange_of(tile: ManyTile) -> Any:
    """`exchange(c, parts, four, peer, part, tx, request)`, which meets twice: the columns of block `part`, summed over the
    cluster, to c[0 .. own_sums - 1]. `parts` takes the place of the ring, `request()` may ask for what is needed next."""
    P, OWN, NEXT = tile.split, tile.own_sums, tile.stride // 2      # sums of a part, and from one part to the next

    @T.inline
    def exchange(c, parts, four, peer, part, tx, request):
        meet()                              # every block of the cluster is done with its ring
        for p in T.unroll(P):
            T.ptx["mapa.shared::cluster.u32"](peer, T.cuda.cvta_generic_to_shared(parts.ptr_to([0])), T.uint32(p))
            if part != p:
                for i in T.unroll(OWN // 4):
                    o = T.meta_var(p * NEXT + i * 4)
                    slot = T.meta_var((part - T.if_then_else(part > p, 1, 0)) * (OWN // 4) + i)
                    T.ptx["st.shared::cluster.v4.f32"](
                        peer + T.Cast("uint32", (slot * CONSUMERS * WG + tx) * 16), c[o], c[o + 1], c[o + 2], c[o + 3])
        for p in T.unroll(1, P):
            if part == p:
                for i in T.unroll(OWN):
                    c[i] = c[p * NEXT + i]
        request()
        meet()
        for i in T.unroll((P - 1) * OWN // 4):
            o = T.meta_var(i * 4 % OWN)
            T.ptx["ld.shared.v4.f32"](four[0], four[1], four[2], four[3], parts.ptr_to([(i * CONSUMERS * WG + tx) * 4]))
            for e in T.unroll(4):
                c[o + e] = c[o + e] + four[e]

    return exchange
