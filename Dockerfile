# Shoal for NVIDIA GPUs:
#   docker build -t shoal:0.1.0 .
# CUDA's libraries come with torch; the driver is the node's, and its container runtime mounts it.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/shoal
ENV PATH=/opt/shoal/bin:$PATH
# The largest layers first, and pinned. rayVersion of the Helm chart names the same Ray.
RUN pip install torch==2.13.0
RUN pip install "ray[serve]==2.60.0"
WORKDIR /src
COPY . .
RUN pip install .

FROM ${PYTHON}
# A compiler and ninja stay in the image: torch builds C++ extensions, and triton what starts its
# kernels, on the machine that runs them. wget is what KubeRay's probes call.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build wget \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 1000 shoal && useradd --uid 1000 --gid 1000 --create-home shoal
COPY --from=build /opt/shoal /opt/shoal
ENV HOME=/home/shoal \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/shoal/bin:$PATH \
    PYTHONUNBUFFERED=1
# Links, because KubeRay may start a login shell, which sets another PATH.
RUN ln -s /opt/shoal/bin/ray /opt/shoal/bin/shoal /usr/local/bin/ \
    && python -m cluster.haproxy /usr/local/bin/shoal-haproxy
LABEL org.opencontainers.image.title="shoal" \
      org.opencontainers.image.description="Serves large language models on a Ray cluster; for NVIDIA GPUs" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 1000:1000
WORKDIR /home/shoal
EXPOSE 8000
CMD ["shoal", "--help"]
