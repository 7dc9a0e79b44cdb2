"""The environments that ship with Ebbtide: a game to try, and adapters to other packages. Each file has `make`."""
