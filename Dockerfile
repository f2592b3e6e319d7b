# For NVIDIA GPUs. torch's wheels bring CUDA, so the host only needs its driver and the container toolkit.
#   docker build -t preference-recipes .
#   docker run --gpus all --ipc host -v "$PWD:/work" preference-recipes run --config_file ddp.yaml --num_processes 8 dpo \
#       --model_name_or_path MODEL --dataset_name pairs.jsonl
# The versions are those of uv.lock, with adapters and 4-bit bases. Without a compiler, so without torch.compile and
# ds_zero3_offload.yaml.
FROM python:3.13.7-slim-trixie

RUN useradd --create-home --uid 1000 trainer && mkdir /work && chown trainer /work
RUN pip install --no-cache-dir uv==0.13.9

ENV UV_PROJECT_ENVIRONMENT=/opt/venv UV_PYTHON_DOWNLOADS=never
WORKDIR /src
COPY . .
RUN uv sync --locked --no-cache --no-editable --compile-bytecode --extra lora --extra qlora

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
ENTRYPOINT ["preference-recipes"]
CMD ["list"]
