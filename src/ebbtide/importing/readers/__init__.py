"""One reader per form in which a config comes: YAML, a shell command, a Python script. What is read is data; nothing of
it is executed, and no environment variable is looked up."""
