"""How a component's linear layers keep their weights and compute; pipelines, engines and memory do not notice."""
