# The page and the API over a store. docs/deploy.md has the commands.
FROM python:3.12-slim
WORKDIR /app
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[formats,torch]" \
    && useradd --create-home seps && mkdir /data && chown seps /data
USER seps
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["seps"]
CMD ["serve", "--store", "/data/store", "--host", "0.0.0.0"]
