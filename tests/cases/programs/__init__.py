"""One small program a file, distilled from a public report; the right result stands in its docstring."""
