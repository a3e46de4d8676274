"""`shardyard pipeline`: Spark jobs over whole topics."""

import typer

from shardyard.cli.pipeline import audit, balance, demo, fanout, history, ingest, install_delta, plan, reshard, routing

app = typer.Typer(
    name="pipeline",
    help="Run Spark jobs over whole topics: fill a lake, measure balance, plan, reshard, audit, fan out.",
    rich_markup_mode="rich",
    no_args_is_help=True,
)
app.command("ingest")(ingest.ingest)
app.command("balance")(balance.balance)
app.command("plan")(plan.plan)
app.command("reshard")(reshard.reshard)
app.command("audit")(audit.audit)
app.command("history")(history.history)
app.command("routing")(routing.routing)
app.command("fanout")(fanout.fanout)
app.command("install-delta")(install_delta.install_delta)
app.command("demo")(demo.demo)
