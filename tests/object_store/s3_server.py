"""A small S3 server on loopback: real HTTP in the S3 protocol, objects in memory, and faults on request.

What pyarrow's S3 client needs: buckets, list (V2, delimiter, pages), head, get with ranges, put, multipart uploads,
copy, delete of one and of many. moto's server answers the same requests, four to eight times as slowly, and brings
fifteen packages.

    with S3Server() as server, server.environment():
        storage.write_text("s3://bucket/a.txt", "hello")
        server.fail_every = 10          # every tenth request is answered by 500 or 503
        server.vanish(seconds=3)        # connections are refused; what was stored is kept
"""

import collections
import hashlib
import html
import http.server
import os
import re
import threading
import time
import urllib.parse
import uuid
from email.utils import formatdate
from unittest import mock
from xml.sax.saxutils import escape

PAGE = 1000  # keys of one answer to a listing, as S3's


class S3Server:
    """Serves `http://127.0.0.1:{port}` in a thread.

    Attributes:
        objects: {(bucket, key): (bytes, time of writing)}
        fail_every: every so many requests one fails; 0: none.
        requests: [(method, path with its query)] of all that came.
        sent: how many bytes of each object, by its key, were sent.
        failures: how many were answered by 500 or 503 on purpose.
        late_every, late_delay: every so many requests one waits for so many seconds; 0: none.
        refuse, refusals: how many writes to paths that match this pattern are still answered by 503.
        cut_every: every so many answers to a GET of an object one breaks off in its middle; 0: none.
        most_copied: bytes of the largest object that one request copies.
        unsigned: how many requests came without credentials.
    """

    def __init__(self, bucket="bucket", secret="test"):
        self.secret, self.unsigned = secret, 0
        self.lock = threading.RLock()
        self.buckets, self.objects, self.uploads, self.completed = {bucket}, {}, {}, {}
        self.fail_every, self.requests, self.failures, self.gone = 0, [], 0, False
        self.sent = collections.Counter()
        self.refuse, self.refusals = "", 0
        self.late_every, self.late_delay, self.cut_every, self.gets = 0, 2, 0, 0
        self.most_copied = 5 * 2**30
        self.httpd = None

    def __enter__(self):
        self.start(port=0)
        return self

    def __exit__(self, *exception):
        self.stop()

    def start(self, port):
        handler = type("Handler", (Handler,), {"state": self})
        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.httpd.daemon_threads = True
        self.port = self.httpd.server_port
        threading.Thread(target=self.httpd.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self.httpd.shutdown()
        self.httpd.server_close()

    def vanish(self, seconds=float("inf")):
        """Refuse connections, and cut those that are open, for some seconds, or until `come_back`; returns at once."""
        self.gone = True
        self.stop()
        if seconds < float("inf"):
            timer = threading.Timer(seconds, self.come_back)
            timer.start()
            return timer

    def come_back(self):
        self.gone = False
        self.start(self.port)

    def environment(self):
        """While this context is open, S3 clients find this server, here and in processes that are started meanwhile."""
        values = {"ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "ACCESS_KEY_ID": "test"}
        values |= {"SECRET_ACCESS_KEY": self.secret}
        values |= {"REGION": "us-east-1", "DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true"}
        return mock.patch.dict(os.environ, {f"AWS_{name}": value for name, value in values.items()})

    def keys(self, prefix=""):
        with self.lock:
            return sorted(key for _, key in self.objects if key.startswith(prefix))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state = None

    def log_message(self, *arguments):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def dispatch(self):
        path, _, query = self.path.partition("?")
        self.bucket, _, self.key = urllib.parse.unquote(path.lstrip("/")).partition("/")
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        body = self.read_body()
        state = self.state
        if state.gone:  # an open connection of a server that is gone
            self.close_connection = True
            return
        with state.lock:
            state.requests.append((self.command, self.path))
            state.unsigned += "Credential=" not in self.headers.get("Authorization", "")
            number = len(state.requests)
            fails = state.fail_every and number % state.fail_every == 0
            state.failures += bool(fails)
            refused = self.command == "PUT" and state.refusals > 0 and bool(re.search(state.refuse, path))
            state.refusals -= refused
        if refused:
            return self.error(503, "SlowDown")
        if state.late_every and number % state.late_every == 0:
            time.sleep(state.late_delay)
        if fails:
            code, name = ((500, "InternalError"), (503, "SlowDown"))[number // state.fail_every % 2]
            return self.error(code, name)
        if self.bucket not in state.buckets and self.command != "PUT":
            return self.error(404, "NoSuchBucket")
        if self.command in ("GET", "HEAD") and self.key:
            return self.get()  # outside of the lock: many are sent at once
        with state.lock:
            getattr(self, f"on_{self.command.lower()}")(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = dispatch

    def read_body(self):
        """The body, out of the chunks with checksums that AWS clients wrap it in."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "STREAMING" not in self.headers.get("x-amz-content-sha256", ""):
            return data
        found, position = b"", 0
        while True:
            end = data.index(b"\r\n", position)
            size = int(data[position:end].split(b";")[0], 16)
            if size == 0:
                return found
            found += data[end + 2 : end + 2 + size]
            position = end + 4 + size

    def answer(self, code, body=b"", **headers):
        body = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.cuts(body):
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return self.wfile.flush()
        self.wfile.write(body)

    def cuts(self, body):
        state = self.state
        if not (state.cut_every and self.command == "GET" and self.key and body):
            return False
        with state.lock:
            state.gets += 1
            return state.gets % state.cut_every == 0

    def error(self, code, name):
        text = f"<Error><Code>{name}</Code><Message>{name}</Message><RequestId>1</RequestId></Error>"
        self.answer(code, text, Content_Type="application/xml")

    def xml(self, name, inner):
        text = f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{name}>'
        self.answer(200, text, Content_Type="application/xml")

    def store(self, data):
        self.state.objects[self.bucket, self.key] = (data, time.time())
        return etag(data)

    # --- the requests ---------------------------------------------------------------------------------

    def on_put(self, body):
        state = self.state
        if not self.key:
            state.buckets.add(self.bucket)
            return self.answer(200)
        if "uploadId" in self.query:
            upload = state.uploads.get(self.query["uploadId"])
            if upload is None:
                return self.error(404, "NoSuchUpload")
            upload[int(self.query["partNumber"])] = body
            return self.answer(200, ETag=etag(body))
        if source := self.headers.get("x-amz-copy-source"):
            bucket, _, key = urllib.parse.unquote(source.lstrip("/")).partition("/")
            if (bucket, key) not in state.objects:
                return self.error(404, "NoSuchKey")
            if len(state.objects[bucket, key][0]) > state.most_copied:
                return self.error(400, "InvalidRequest")
            found = self.store(state.objects[bucket, key][0])
            changed = f"<LastModified>{iso(time.time())}</LastModified>"
            return self.xml("CopyObjectResult", f"<ETag>{escape(found)}</ETag>{changed}")
        self.answer(200, ETag=self.store(body))

    def on_post(self, body):
        state = self.state
        if "uploads" in self.query:
            number = uuid.uuid4().hex
            state.uploads[number] = {}
            names = f"<Bucket>{escape(self.bucket)}</Bucket><Key>{escape(self.key)}</Key>"
            return self.xml("InitiateMultipartUploadResult", f"{names}<UploadId>{number}</UploadId>")
        if "uploadId" in self.query:
            upload = self.query["uploadId"]
            if upload in state.completed:  # a client that did not get the answer asks again
                return self.completed(state.completed[upload])
            parts = state.uploads.get(upload)
            if parts is None:
                return self.error(404, "NoSuchUpload")
            wanted = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
            if any(len(parts[number]) < 5 * 2**20 for number in wanted[:-1]):
                return self.error(400, "EntityTooSmall")
            state.completed[upload] = self.store(b"".join(parts[number] for number in wanted))
            del state.uploads[upload]
            return self.completed(state.completed[upload])
        if "delete" in self.query:
            keys = [html.unescape(key) for key in re.findall("<Key>(.*?)</Key>", body.decode(), re.DOTALL)]
            for key in keys:
                state.objects.pop((self.bucket, key), None)
            return self.xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))
        self.error(400, "InvalidRequest")

    def completed(self, found):
        place = f"<Location>{escape(self.path)}</Location>"
        names = f"{place}<Bucket>{escape(self.bucket)}</Bucket><Key>{escape(self.key)}</Key>"
        self.xml("CompleteMultipartUploadResult", f"{names}<ETag>{escape(found)}</ETag>")

    def on_delete(self, body):
        if "uploadId" in self.query:
            self.state.uploads.pop(self.query["uploadId"], None)
        else:
            self.state.objects.pop((self.bucket, self.key), None)
        self.answer(204)

    def on_head(self, body):
        self.answer(200, x_amz_bucket_region="us-east-1")

    def on_get(self, body):
        return self.xml("LocationConstraint", "us-east-1") if "location" in self.query else self.list()

    def get(self):
        found = self.state.objects.get((self.bucket, self.key))
        if found is None:
            return self.answer(404) if self.command == "HEAD" else self.error(404, "NoSuchKey")
        data, changed = found
        headers = {
            "ETag": etag(data),
            "Last_Modified": formatdate(changed, usegmt=True),
            "Accept_Ranges": "bytes",
            "Content_Type": "binary/octet-stream",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self.answer(200, data, Content_Length=str(len(data)), **headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        if first >= len(data):
            return self.error(416, "InvalidRange")
        part = memoryview(data)[first : last + 1]
        with self.state.lock:
            self.state.sent[self.key] += len(part)
        self.answer(
            206, part, Content_Length=str(len(part)), Content_Range=f"bytes {first}-{last}/{len(data)}", **headers
        )

    def list(self):
        """ListObjectsV2."""
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        limit = min(int(self.query.get("max-keys", PAGE)), PAGE)
        entries = {}  # {key, or what keys have in common up to the delimiter: XML}
        for bucket, key in sorted(self.state.objects):
            if bucket != self.bucket or not key.startswith(prefix):
                continue
            head, common, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = prefix + head + delimiter if common else key
            if name <= after:
                continue
            data, changed = self.state.objects[bucket, key]
            about = (
                f"<LastModified>{iso(changed)}</LastModified><ETag>{escape(etag(data))}</ETag><Size>{len(data)}</Size>"
            )
            entries[name] = (
                f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                if common
                else f"<Contents><Key>{escape(key)}</Key>{about}<StorageClass>STANDARD</StorageClass></Contents>"
            )
        page, more = list(entries)[:limit], len(entries) > limit
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        about = f"<Name>{escape(self.bucket)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
        about += f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
        self.xml("ListBucketResult", about + token + "".join(entries[name] for name in page))


def etag(data):
    """Of an object's size and ends: to hash all of a large one at every request would take longer than to send it."""
    return f'"{hashlib.md5(b"%d" % len(data) + data[:4096] + data[-4096:]).hexdigest()}"'


def iso(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
