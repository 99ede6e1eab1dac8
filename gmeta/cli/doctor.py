"""``gmeta doctor``: what is installed here, and what is wrong with it."""

from __future__ import annotations

import click

from gmeta.core import doctor as core


@click.command("doctor")
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Say what this installation is and what is wrong with it.

    Each line is one thing; a line that starts with BROKEN is a problem, and ends with its remedy. Exits with
    1 if anything that gmeta needs is broken.
    """
    findings = core.examine()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        text = f"{finding.value}: {finding.remedy}" if finding.remedy else finding.value
        click.echo(f"{finding.status.value:<6}  {finding.subject:<{width}}  {text}")
    broken = sum(finding.status is core.Status.BROKEN for finding in findings)
    click.echo(f"{broken} broken" if broken else "everything that gmeta needs works")
    ctx.exit(1 if broken else 0)
