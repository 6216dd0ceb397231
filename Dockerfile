# The environment of scripts/environment as an image, for a CPU:
#   docker build --tag roi-lightning .
#   docker run --rm roi-lightning scripts/test
#   docker run --rm roi-lightning scripts/quickstart
# For a CUDA GPU name an image that has CUDA, and the packages that it lacks:
#   docker build --tag roi-lightning --build-arg BASE=IMAGE --build-arg PACKAGES="g++ git python3-dev python3-venv" .
#   docker run --rm --gpus all roi-lightning scripts/quickstart
# TORCH_INDEX is another index of packages for torch: a smaller build for CPUs, or one for another CUDA.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG PACKAGES="g++ git"
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY . .
RUN PIP_EXTRA_INDEX_URL=${TORCH_INDEX} bash -e scripts/environment
ENV PATH=/workspace/.venv/bin:${PATH}
CMD ["scripts/quickstart"]
