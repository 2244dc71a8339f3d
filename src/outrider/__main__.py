"""The command `outrider`, also as `python -m outrider`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C while it is loaded ends the process without a traceback."""
    meant = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from outrider.cli.main import app

    signal.signal(signal.SIGINT, meant)
    app(prog_name="outrider")


if __name__ == "__main__":
    main()
