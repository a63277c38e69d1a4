"""Names of the sides of a region, in records and in figures."""

UNFUSED, OWN_GEMM, SDPA, FUSED, ONE_CALL = "unfused", "unfused, own GEMM", "torch SDPA", "fused", "one call"
GRAPH = ", graph"  # ending of a side's name if the GPU replays its calls as one CUDA graph
TITLES = {
    UNFUSED: "unfused, torch's GEMM",
    OWN_GEMM: "unfused, own GEMM",
    SDPA: "torch's fused attention",
    FUSED: "fused, called from Python",
    ONE_CALL: "fused, in the one-call step",
    UNFUSED + GRAPH: "unfused, in a CUDA graph",
    OWN_GEMM + GRAPH: "own GEMM, in a graph",
    SDPA + GRAPH: "torch's attention, in a graph",
    FUSED + GRAPH: "fused, in a CUDA graph",
}
