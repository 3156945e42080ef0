"""`speclen dashboard`: Datasette on the live database, with charts and canned queries."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.output import UserError, user_errors
from speclen.process.settings import is_loopback, split_address

if TYPE_CHECKING:
    from datasette.app import Datasette

# Queries and charts use this name for the database, whatever the file is called.
DATABASE_NAME = "speclen"
METADATA = Path(__file__).with_name("dashboard.yaml")
ONE_LINE = 25  # characters of the longest arm or time; such texts are not wrapped
LARGEST_SHORT = 1e6  # larger numbers are times since 1970


def dashboard(
    db: Path = DB_OPTION,
    listen: str = typer.Option("127.0.0.1:7090", help="Address of the web pages, HOST:PORT."),
    insecure: bool = typer.Option(
        False, "--insecure", help="Allow an address other than loopback: anyone who can reach it can read everything."
    ),
    open_browser: bool = typer.Option(False, "--open", help="Open the dashboard in a browser."),
) -> None:
    """Show what was learned in a web browser: arms over time, predictions, workers. The controller may be running.

    Needs `pip install 'speclen[inspect]'`.

    Example: speclen dashboard --db .speclen/speclen.db --open
    """
    host, port = address(listen, insecure)
    application = create_application(db)
    import uvicorn

    page = f"http://{f'[{host}]' if ':' in host else host}:{port}/-/dashboards/learned"
    server = uvicorn.Server(uvicorn.Config(application.app(), host=host, port=port, log_level="warning"))
    print(f"{page}  (Ctrl-C to stop)", flush=True)
    if open_browser:
        webbrowser.open(page)
    try:
        server.run()
    except KeyboardInterrupt:  # uvicorn raises it again after shutting down
        return
    except SystemExit as error:  # uvicorn exits if it cannot bind
        raise UserError(f"cannot listen on {listen}: choose another address with --listen") from error


def address(listen: str, insecure: bool) -> tuple[str, int]:
    """Host and port. Raises UserError if the address is malformed, or is not loopback and --insecure is missing."""
    with user_errors():
        host, port = split_address("--listen", listen)
    if not is_loopback(host) and not insecure:
        raise UserError(
            f"--listen {listen} is reachable by others without a password: use 127.0.0.1, or give --insecure"
        )
    return host, port


def create_application(db: Path) -> Datasette:
    """Datasette on one read-only database. Raises UserError if the file or the packages are missing."""
    with reading(db):
        pass  # one error now instead of one on every page
    try:
        import datasette_dashboards  # noqa: F401
        from datasette import hookimpl
        from datasette.app import Datasette
        from datasette.database import Database
        from datasette.plugins import pm
        from datasette.utils import parse_metadata
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: run pip install 'speclen[inspect]'") from error
    application = Datasette(
        metadata=parse_metadata(METADATA.read_text()),
        settings={"default_page_size": 100, "allow_download": False, "num_sql_threads": 2},
    )
    if not pm.has_plugin(DATABASE_NAME):
        hookimpl(render_cell)
        pm.register(sys.modules[__name__], DATABASE_NAME)
    application.add_database(Database(application, path=str(db), is_mutable=True), name=DATABASE_NAME)
    return application


def render_cell(value: Any) -> Any:
    """Render a cell: numbers with four digits, short texts on one line. None leaves it to Datasette."""
    from markupsafe import Markup

    if isinstance(value, float) and abs(value) < LARGEST_SHORT:
        return f"{value:.4g}"
    if isinstance(value, str) and len(value) <= ONE_LINE:
        return Markup('<span style="white-space: nowrap">{}</span>').format(value)
    return None
