# One image for API and worker; docker-compose.yml says which it is.
# TORCH_INDEX_URL: package index to take torch from, for example a CPU-only one.
FROM python:3.11-slim
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 RECAST_HOME=/data OMP_WAIT_POLICY=passive
RUN apt-get update && apt-get install -y --no-install-recommends libgl1 libglib2.0-0 && rm -rf /var/lib/apt/lists/*
WORKDIR /app
RUN if [ -n "$TORCH_INDEX_URL" ]; then pip install --index-url "$TORCH_INDEX_URL" 'torch>=2.6,<2.14'; fi
COPY . .
RUN pip install '.[rewards,proposals,postgres,s3]' \
    && useradd --create-home recast && mkdir /data && chown recast /data
USER recast
VOLUME /data
EXPOSE 8000
CMD ["sh", "-c", "recast init && exec uvicorn api.main:app --host 0.0.0.0 --port 8000 --no-access-log"]
