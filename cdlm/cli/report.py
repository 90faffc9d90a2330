"""`cdlm report`: results in, tables and figures out."""

from cdlm.cli.common import console, parse
from cdlm.eval.config import ReportConfig


def main(arguments: list[str]) -> None:
    config = parse(ReportConfig, "report", arguments)
    from cdlm.eval.report.write import write_report

    write_report(config, console())
