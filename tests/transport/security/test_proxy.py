"""Which way a connection takes, by the environment."""

import pytest

from potluck.transport.security.proxy import Proxy, channel_options, proxy_for
from potluck.types.errors import AddressError

WAY = {"https_proxy": "http://proxy.example:3128"}


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({"https_proxy": "http://p:1", "http_proxy": "http://p:2", "grpc_proxy": "http://p:3"}, 3),
        ({"https_proxy": "http://p:1", "http_proxy": "http://p:2"}, 1),
        ({"https_proxy": "http://p:1", "HTTPS_PROXY": "http://p:2"}, 1),
        ({"HTTP_PROXY": "p:2"}, 2),
        ({"https_proxy": "http://p"}, 80),
    ],
)
def test_the_first_variable_that_is_set_wins(environ, port):
    proxy = proxy_for("far.example", environ)
    assert proxy is not None and (proxy.host, proxy.port) == ("p", port)


@pytest.mark.parametrize("environ", [{}, {"https_proxy": ""}, {"all_proxy": "socks5://p:1"}])
def test_no_proxy_named(environ):
    assert proxy_for("far.example", environ) is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "LOCALHOST."])
def test_loopback_never_goes_through_a_proxy(host):
    assert proxy_for(host, WAY) is None
    assert channel_options(host, WAY) == [("grpc.enable_http_proxy", 0)]


@pytest.mark.parametrize(
    ("no_proxy", "host", "direct"),
    [
        ("*", "far.example", True),
        ("other, .example", "far.example", True),
        ("example", "far.example", True),
        ("*.example", "far.example", True),
        ("far.example", "FAR.example.", True),
        ("ar.example", "far.example", False),
        ("far.example", "very.far.example", True),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("2001:db8::/32", "2001:db8::5", True),
        ("10.0.0.0/8", "far.example", False),
        (",,", "far.example", False),
    ],
)
def test_no_proxy(no_proxy, host, direct):
    environ = {**WAY, "NO_PROXY": no_proxy}
    expected = None if direct else Proxy(host="proxy.example", port=3128, url="http://proxy.example:3128")
    assert proxy_for(host, environ) == expected


def test_user_and_password_reach_both_ways_and_no_text():
    environ = {"https_proxy": "http://me:s%40c@p:8"}
    proxy = proxy_for("far.example", environ)
    assert proxy is not None and proxy.user == "me:s@c"
    assert "s@c" not in repr(proxy) and "s%40c" not in repr(proxy)
    assert channel_options("far.example", environ) == [("grpc.http_proxy", "http://me:s%40c@p:8")]


@pytest.mark.parametrize("value", ["socks5://p:1", "https://p:1", "http://", "http://p:99999", "http://[::1"])
def test_a_variable_that_names_no_http_proxy(value):
    with pytest.raises(AddressError, match="https_proxy does not name a proxy"):
        proxy_for("far.example", {"https_proxy": value})
