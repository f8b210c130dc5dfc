"""What people type: the command line, the Python client, the embedded servers and the quickstart."""
