# headwise on the CPU. docker build -t headwise . && docker run --rm headwise cost gqa mla
# A model and its texts: docker run --rm -v "$PWD:/data" headwise heads model --data texts.txt
# The page: docker run --rm -p 8000:8000 headwise view --no-browser --host 0.0.0.0 --port 8000 --allow-remote

FROM python:3.13-slim AS wheel
WORKDIR /source
COPY pyproject.toml build_web.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.13-slim
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /dist /dist
# The index of CPU builds has torch without CUDA, which is five times smaller.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        -c /tmp/constraints.txt "$(ls /dist/*.whl)" \
    && rm -r /dist /tmp/constraints.txt \
    && useradd --create-home headwise && mkdir /data && chown headwise /data
USER headwise
WORKDIR /data
ENTRYPOINT ["headwise"]
CMD ["--help"]
