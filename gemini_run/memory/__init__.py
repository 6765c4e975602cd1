"""Local host memory: one directory a node, owned by its agent, outliving the workers."""
