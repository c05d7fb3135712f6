"""`polymux bench serve`: a load generator for servers that make media. Knows HTTP and clocks; nothing of how polymux
serves."""
