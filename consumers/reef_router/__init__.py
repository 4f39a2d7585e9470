"""SGLang's router as a component of a deployment: its workers are the engines that may generate, and no others."""
