"""`python -m shardyard.cli`, and the file that `spark-submit` takes."""

from shardyard.cli import main

main()
