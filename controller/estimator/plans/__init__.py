"""Plans that copy: how often rows match and what is accepted of copies, what such steps take, and which plan to play."""
