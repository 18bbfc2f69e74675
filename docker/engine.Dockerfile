# The image of an engine with kvbridge in it, from the engine's own:
#   docker build --file docker/engine.Dockerfile --build-arg BASE=vllm/vllm-openai:v0.32.0 .
#   docker build --file docker/engine.Dockerfile --build-arg BASE=lmsysorg/sglang:v0.5.23 .
# The engine has decided on torch and CUDA; kvbridge and what lacks of its extra are installed beside them.
ARG BASE
FROM ${BASE}
# vllm: Mooncake and NIXL for GPUs, cpu: those for processors
ARG EXTRA=vllm
USER root
COPY . /src
RUN python3 -m pip install --no-cache-dir "/src[${EXTRA}]" && install /src/docker/locking-memory.sh /usr/local/bin/ && \
    bash /src/docker/build.sh user && rm -r /src
ENV HOME=/var/lib/kvbridge
USER 10001:10001
ENTRYPOINT []
