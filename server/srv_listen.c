/* SPDX-License-Identifier: Apache-2.0 */
/* srv_listen.c - where the server listens, and who may call: key, Host, Origin. */
#include "srv_http.h"
#include "srv_key.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#define TRIES 16u /* for a port that both families have free */

/* ---- the socket ---------------------------------------------------------------------------- */

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr) >> 24 == 127;
    return a->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr);
}

static uint16_t port_of(int fd)
{
    struct sockaddr_storage a;
    socklen_t               len = sizeof(a);

    if (getsockname(fd, (struct sockaddr *)&a, &len) != 0)
        return 0;
    return ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port
                                         : ((struct sockaddr_in *)&a)->sin_port);
}

static kvd_status listen_on(const char *host, const struct addrinfo *a, int *out, kvd_err *err)
{
    const int on = 1;
    const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int       sys;

    if (fd < 0)
        return kvd_fail(err, KVD_E_IO, errno, "socket for --host %s", host);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) {
        *out = fd;
        return KVD_OK;
    }
    sys = errno;
    close(fd);
    return kvd_fail(err, KVD_E_IO, sys, "listening on %s", host);
}

static kvd_status look_up(const char *host, uint16_t port, struct addrinfo **found, kvd_err *err)
{
    const struct addrinfo hints = { .ai_family   = AF_UNSPEC,
                                    .ai_socktype = SOCK_STREAM,
                                    .ai_flags    = AI_PASSIVE | AI_NUMERICSERV };
    char                  text[8];
    int                   rc;

    snprintf(text, sizeof(text), "%u", port);
    rc = getaddrinfo(host, text, &hints, found);
    if (rc)
        return kvd_fail(err, KVD_E_INVAL, 0, "--host %s: %s", host, gai_strerror(rc));
    return KVD_OK;
}

static kvd_status listen_at(const char *address, uint16_t port, int *fd, kvd_err *err)
{
    struct addrinfo *found = NULL;
    kvd_status       st    = look_up(address, port, &found, err);

    if (st == KVD_OK)
        st = listen_on(address, found, fd, err);
    if (found)
        freeaddrinfo(found);
    return st;
}

/* Whether it failed since the system has no such addresses. */
static bool is_missing(kvd_status st, const kvd_err *err)
{
    return st == KVD_E_IO && (err->sys == EADDRNOTAVAIL || err->sys == EAFNOSUPPORT);
}

/* By this name some clients look for IPv4, some for IPv6, and some for either: all of them find the
 * same port of both.  Where somebody else has one of them, they would find him. */
static kvd_status listen_on_localhost(srv *s, kvd_err *err)
{
    kvd_status st;

    s->loopback = true;
    for (uint32_t i = 0;; i++) {
        st = listen_at("127.0.0.1", s->p.port, &s->listen_fd[0], err);
        if (is_missing(st, err))
            return listen_at("::1", s->p.port, &s->listen_fd[0], err);
        KVD_TRY(st);
        st = listen_at("::1", port_of(s->listen_fd[0]), &s->listen_fd[1], err);
        if (st == KVD_OK || is_missing(st, err))
            return KVD_OK;
        if (s->p.port || i == TRIES || err->sys != EADDRINUSE)
            return st;
        close(s->listen_fd[0]);
        s->listen_fd[0] = -1;
    }
}

static kvd_status listen_on_host(srv *s, kvd_err *err)
{
    struct addrinfo *found = NULL;
    kvd_status       st;

    KVD_TRY(look_up(s->p.host, s->p.port, &found, err));
    s->loopback = is_loopback(found->ai_addr);
    if (!s->loopback && !s->p.key && !s->p.open)
        st = kvd_fail(err, KVD_E_INVAL, 0,
                      "--host %s lets others in: give a key (--api-key-file, KVDRIVE_API_KEY), or "
                      "say --without-key",
                      s->p.host);
    else
        st = listen_on(s->p.host, found, &s->listen_fd[0], err);
    freeaddrinfo(found);
    return st;
}

static const char *way_on(int sys)
{
    switch (sys) {
    case EADDRINUSE:
        return ": another program listens there, choose another --port";
    case EADDRNOTAVAIL:
        return ": no address of this machine, choose another --host";
    case EACCES:
        return ": for that a right is missing, choose a --port above 1023";
    default:
        return "";
    }
}

kvd_status srv_listen(srv *s, kvd_err *err)
{
    const bool local = strcasecmp(s->p.host, "localhost") == 0;
    kvd_status st    = (local ? listen_on_localhost : listen_on_host)(s, err);

    if (st == KVD_E_IO)
        return kvd_fail(err, st, err->sys, "--host %s, --port %u%s", s->p.host, s->p.port,
                        way_on(err->sys));
    KVD_TRY(st);
    s->port = port_of(s->listen_fd[0]);
    return KVD_OK;
}

/* ---- who may call ------------------------------------------------------------------------------
 */

static const char *header(const srv_call *c, const char *name)
{
    return srv_head_get(&c->head, name);
}

static bool has_key(const srv_call *c)
{
    const char *bearer = header(c, "Authorization"), *plain = header(c, "x-api-key");

    if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0)
        return srv_same_key(bearer + 7, c->s->p.key);
    return plain && srv_same_key(plain, c->s->p.key);
}

/* Length of "host" in "host:port" or "[::1]:port". */
static size_t host_len(const char *s)
{
    const char *end = *s == '[' ? strchr(s, ']') : NULL;

    return end ? (size_t)(end - s) + 1 : strcspn(s, ":/");
}

static bool is_local_name(const char *s, size_t len)
{
    return (len == 9 && strncasecmp(s, "localhost", 9) == 0) ||
           (len == 5 && strncmp(s, "[::1]", 5) == 0) ||
           (len >= 7 && len <= 15 && strncmp(s, "127.", 4) == 0 && strspn(s, "0123456789.") == len);
}

/* A name that leads here although it is not ours is how web pages get around the browser's rules.
 */
static bool good_host(const srv_call *c)
{
    const char *h = header(c, "Host");

    return !c->s->loopback || (h && is_local_name(h, host_len(h)));
}

/* Browsers send it with everything that a page of another origin asks for. */
static bool good_origin(const srv_call *c)
{
    const char *o = header(c, "Origin"), *h = header(c, "Host"), *allowed = c->s->p.origin;
    const char *at = o ? strstr(o, "://") : NULL;

    if (!o || (allowed && (strcmp(allowed, "*") == 0 || strcmp(allowed, o) == 0)))
        return true;
    return at && h && strcasecmp(at + 3, h) == 0;
}

/* What stands behind the route's path, where it takes that; NULL: it is another's. */
static const char *behind(const srv_route *r, const char *path)
{
    const size_t n = strlen(r->path);

    if (strcmp(r->path, path) == 0)
        return "";
    return n > 1 && r->path[n - 1] == '/' && strncmp(r->path, path, n) == 0 ? path + n : NULL;
}

static void add_allowed(srv_reply *r, const char *method)
{
    const size_t n = strlen(r->allow);

    snprintf(r->allow + n, sizeof(r->allow) - n, "%s%s", n ? ", " : "", method);
}

/* The path has in it what the client gives as its key: that is not for the log. */
static bool has_secret(const srv_call *c, const char *path)
{
    const char *bearer = header(c, "Authorization"), *plain = header(c, "x-api-key");

    if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0)
        bearer += 7;
    return (bearer && *bearer && strstr(path, bearer)) || (plain && *plain && strstr(path, plain));
}

/* The log has the path, but no query: that was cut off, unless its mark was escaped. */
static void no_route(srv_call *c, const char *path)
{
    const char *say = srv_route_elsewhere(path);
    char        quoted[sizeof(c->nowhere) - sizeof(" \"\"")];

    srv_reply_error(&c->reply, 404, NULL, NULL, "there is no %s%s%s", path, say ? ": " : "",
                    say ? say : "");
    srv_log_quote(path, strcspn(path, "?"), quoted, sizeof(quoted));
    if (!has_secret(c, path))
        snprintf(c->nowhere, sizeof(c->nowhere), " \"%s\"", quoted);
}

/* The log has the route of calls that are refused, too. */
static void find_route(srv_call *c, const char *method, const char *path)
{
    for (uint32_t i = 0; i < srv_n_route; i++) {
        const char *name = behind(&srv_routes[i], path);

        if (!name)
            continue;
        c->at = c->at ? c->at : srv_routes[i].path;
        add_allowed(&c->reply, srv_routes[i].method);
        if (strcmp(srv_routes[i].method, method) == 0) {
            c->route = &srv_routes[i];
            c->name  = name;
        }
    }
}

/* Headers that clients in a browser send. */
static bool may_send(const char *name, size_t len)
{
    static const char *const names[] = {
        "authorization",       "content-type",   "x-api-key",
        "anthropic-version",   "anthropic-beta", "anthropic-dangerous-direct-browser-access",
        "openai-organization", "openai-project", "openai-beta",
        "user-agent"
    };

    for (uint32_t i = 0; i < KVD_COUNTOF(names); i++)
        if (len == strlen(names[i]) && strncasecmp(name, names[i], len) == 0)
            return true;
    return len > 12 && strncasecmp(name, "x-stainless-", 12) == 0 &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") >= len;
}

/* Of the names that a preflight asks for those that may be sent, as far as there is room. */
static void put_may_send(srv_call *c)
{
    const char *p   = header(c, "Access-Control-Request-Headers");
    char       *out = c->reply.may_send;
    size_t      n   = 0;

    for (; p && *p; p += strspn(p, ", \t")) {
        const size_t len = strcspn(p, ", \t");

        if (may_send(p, len) && n + 2 + len < sizeof(c->reply.may_send))
            n += (size_t)snprintf(out + n, sizeof(c->reply.may_send) - n, "%s%.*s", n ? ", " : "",
                                  (int)len, p);
        p += len;
    }
}

static void preflight(srv_call *c)
{
    if (c->s->p.origin) {
        c->reply.status = 204;
        put_may_send(c);
    } else {
        srv_reply_error(
            &c->reply, 403, NULL, NULL,
            "web pages of other origins may not call: --cors-origin says of which one may");
    }
}

/* What a proxy in front may read otherwise was refused when the head was read.  Where the next
 * request begins nobody can say then. */
static bool is_plain(srv_call *c)
{
    if (!c->head.status)
        return true;
    srv_reply_error(&c->reply, c->head.status, NULL, NULL, "%s", c->head.why);
    c->reply.last = true;
    return false;
}

/* The length that the request announces is checked before any of it is read. */
static void check_length(srv_call *c)
{
    const uint64_t most = c->s->p.body_bytes;

    if (c->head.length == UINT64_MAX)
        srv_reply_error(&c->reply, 413, NULL, NULL,
                        "a body of so many bytes: at most %llu (--body-limit)",
                        (unsigned long long)most);
    else if (c->head.length > most)
        srv_reply_error(&c->reply, 413, NULL, NULL,
                        "a body of %llu bytes: at most %llu (--body-limit)",
                        (unsigned long long)c->head.length, (unsigned long long)most);
}

bool srv_guard(srv_call *c)
{
    const char *method = c->head.method, *path = c->head.path;

    find_route(c, method, path);
    if (!is_plain(c))
        return false;
    if (!good_host(c))
        srv_reply_error(&c->reply, 403, NULL, NULL,
                        "this Host is no name of loopback, where alone the server listens: ask for "
                        "localhost, or start it with another --host");
    else if (!good_origin(c))
        srv_reply_error(
            &c->reply, 403, NULL, NULL,
            "web pages of this origin may not call: --cors-origin says of which one may");
    else if (strcmp(method, "OPTIONS") == 0)
        preflight(c);
    else if (!c->at)
        no_route(c, path);
    else if (!c->route)
        srv_reply_error(&c->reply, 405, NULL, NULL, "%s does not take %s, but %s", path, method,
                        c->reply.allow);
    /* what exists is not told without a key either */
    if (c->s->p.key && !(c->route && c->route->open) && c->reply.status != 204 &&
        c->reply.status != 403 && !has_key(c))
        srv_reply_error(
            &c->reply, 401, NULL, "invalid_api_key",
            "the key is missing or wrong (Authorization: Bearer KEY, or x-api-key: KEY)");
    if (!c->reply.status)
        check_length(c);
    return c->reply.status == 0;
}
