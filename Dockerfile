# An image for the README's commands; it has been linted, but never built. Run folders stay in ./runs of the host:
#
#   docker build -t esper . && docker run --rm -it -v "$PWD/runs:/esper/runs" esper esper run
FROM python:3.12-slim

# Any g++ that Debian ships will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /esper
COPY . .
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir -e ".[test]"

CMD ["esper", "run"]
