"""`shardyard pipeline install-delta`: download the jars of Delta Lake."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

from shardyard.cli.output import print_message
from shardyard.cli.pipeline.options import require_spark


def install_delta() -> None:
    """Download the jars of Delta Lake with Maven, once, into a cache of the user.

    From then on, new lakes are Delta tables. If the jars are there already, nothing is done.

    Examples:

      shardyard pipeline install-delta
    """
    require_spark()
    from shardyard.pipeline.delta_jars import install

    print_message(f"Delta Lake is installed in {install()}")
