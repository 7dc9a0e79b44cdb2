"""The `ebbtide` command, and `python -m ebbtide`."""

from ebbtide import stop


def main() -> None:
    stop.at_once(lambda: "stopped before the first step")  # importing the commands takes a second already
    from ebbtide.cli import main as command

    command()


if __name__ == "__main__":
    main()
