"""What a build takes and gives, as a table: for ``build --dry-run`` and ``memory --engine``."""

from trt_kvcache.builder.estimate import BuildEstimate
from trt_kvcache.cli.console import results, size, table


def print_build_sizes(estimate: BuildEstimate) -> None:
    """Print an estimate of a build."""
    rows = table("what", "bytes", "size", numbers=("bytes", "size"), title="Before the build (estimate)")
    constants = {"constants": estimate.constants_nbytes} if estimate.constants_nbytes else {}
    sizes = {
        "weights": estimate.weights_nbytes,
        "plan: weights and kernels": estimate.plan_nbytes,
        **constants,
        "cache": estimate.cache_nbytes,
        "activations and logits": estimate.activations_nbytes,
        "GPU, in all": estimate.device_nbytes,
        "disk": estimate.disk_nbytes,
        "host, at the peak of the build": estimate.host_peak_nbytes,
    }
    for what, nbytes in sizes.items():
        rows.add_row(what, str(nbytes), size(nbytes))
    results().print(rows)
