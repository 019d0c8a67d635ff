"""The shipping coordinator and workers in one process, over modelled links, on a virtual or a real clock."""
