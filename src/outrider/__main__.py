"""`python -m outrider`."""

from outrider.cli.main import app

if __name__ == "__main__":
    app(prog_name="outrider")
