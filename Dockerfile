# labkit where Docker runs, such as on macOS and Windows: JupyterLab with all notebooks and exercises, on the CPU.
#
#   docker build --tag labkit .
#   docker run --rm --init --publish 127.0.0.1:8888:8888 --volume labkit-work:/work labkit
#
# Then open the address that it prints. The notebooks in which you worked stay in the volume labkit-work.

FROM python:3.11-slim-bookworm AS tools
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ git make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --shell /bin/bash labkit
USER labkit

FROM tools
COPY --chown=labkit . /home/labkit/checkout
WORKDIR /home/labkit/checkout
RUN PIP_NO_CACHE_DIR=1 make .venv/.ready
ENV PATH=/home/labkit/checkout/.venv/bin:$PATH
USER root
RUN mkdir /work && chown labkit /work
USER labkit
WORKDIR /work
EXPOSE 8888
CMD ["labkit", "lab", "--ip", "0.0.0.0", "--port", "8888", "--no-browser"]
