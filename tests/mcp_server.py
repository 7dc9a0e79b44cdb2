"""An MCP server with two tools, by stdio."""

from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


@server.tool()
def fail() -> str:
    """Never works."""
    raise ValueError("not today")


if __name__ == "__main__":
    server.run("stdio")
